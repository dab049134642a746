"""torch.profiler: record a trace, for Perfetto and for us, and read it into a `Profile`."""

import gzip
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from labbook.files import make_folder, write_atomically
from labbook.profiles.table import STEP, Profile, ProfileError, launched

_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_CALLS = ("cuda_runtime", "cuda_driver")
# Ranges that PyTorch opens by itself; a path is made of ours.
FOREIGN = re.compile(
    r"^(Optimizer\.|ProfilerStep|nccl:|gloo:|c10d|Torch-Compiled|DistributedDataParallel|## )"
)
# Operators that touch no data: views, allocations and autograd's own nodes. The host's work, and no kernels.
_BOOKKEEPING = re.compile(
    r"^aten::(view|_?unsafe_view|reshape|_reshape_alias|transpose|t|numpy_T|as_strided|expand|expand_as|unsqueeze|squeeze"
    r"|select|slice|narrow|detach_?|alias|permute|unbind|split|chunk|flatten|unflatten|movedim|swapaxes|view_as|lift_fresh"
    r"|(new_)?(empty|zeros|ones)(_like|_strided)?|resize_|promote_types|real|resolve_(conj|neg)|result_type|item|is_nonzero|set_|diagonal|broadcast\w*)$"
    r"|^detach_?$|^torch::autograd|^autograd::|Backward\d*$|^profiler::|^Torch-|^CompiledFunction|^TorchDynamo"
)
_FIELDS = ["cat", "name", "pid", "tid", "ts", "dur"]  # of every event that is read
_ARGUMENTS = ["correlation", "stream"]


def record_trace(
    run: Callable[[], Any], path: Path, *, device: torch.device | str, with_memory: bool = False
) -> Profile:
    """Call `run()` under torch.profiler and save a Chrome trace, .json or .json.gz (for ui.perfetto.dev).

    Args:
        run: what to profile; warm it up before, and open ranges in it with record_function.
        with_memory: also record every allocation.

    Raises:
        ProfileError: see `read_trace`.
    """
    on_cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with warnings.catch_warnings():
        # torch 2.11 says each time that a profile holds its own events only: that is what is wanted.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        with profile(activities=activities, profile_memory=with_memory) as profiler:
            run()
            if on_cuda:
                torch.cuda.synchronize(device)
    make_folder(path.parent)
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


def keep_one_step(path: Path, kept: Path) -> None:
    """Write the last step of a trace, without what neither a reader nor `read_trace` needs, to a .json.gz.

    Of a CUDA trace that is the ranges, the launches and the kernels: a hundredth of the bytes.

    Raises:
        ProfileError: it has no step, a range `measure`; or as `read_trace`.
    """
    trace = load_trace(path)
    events = trace_events(trace, path.name)
    steps = events[(events.kind == "user_annotation") & (events.name == STEP)]
    if steps.empty:
        raise ProfileError(f"{path.name} has no step to keep: no range {STEP!r} was recorded in it")
    step, on_gpu = steps.loc[steps.start_ns.idxmax()], events.kind.isin(_KINDS)
    host = events.kind.isin(["user_annotation", *(_CALLS if on_gpu.any() else ["cpu_op"])])
    inside = host & (events.start_ns >= step.start_ns) & (events.start_ns < step.end_ns)
    inside |= on_gpu & events.correlation.isin(events.correlation[inside].dropna())
    small = [event for event in trace["traceEvents"] if event.get("ph") == "M"]
    for event in (trace["traceEvents"][place] for place in events.index[inside]):
        args = {name: value for name, value in (event.get("args") or {}).items() if name in _ARGUMENTS}
        small.append({name: event[name] for name in ("ph", *_FIELDS)} | {"args": args})
    text = json.dumps({"traceEvents": small}, separators=(",", ":"))
    write_atomically(kept, gzip.compress(text.encode(), mtime=0))


def load_trace(path: Path) -> dict[str, Any]:
    """The JSON of a trace file. Raises FileNotFoundError; ProfileError: it is cut off, or no trace."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        return trace | {"traceEvents": list(trace["traceEvents"])}
    except FileNotFoundError:
        raise
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise ProfileError(f"{path.name} is cut off or no trace ({error!r}); record it again") from None


def read_trace(path: Path) -> Profile:
    """Read a torch.profiler trace: a GPU's kernels where it has some, else the CPU's operators.

    On a CPU an operator's own time counts, without the operators that it calls, and operators that touch no
    data (views, allocations) are left out: what remains corresponds to a GPU's kernels. A stream is a thread.
    Gloo communicates on threads of its own, and what it does there counts like NCCL's kernels.

    Raises:
        FileNotFoundError, ProfileError: see `load_trace`; there are no kernels or no ranges; events lack what
            every such event has; or several processes are merged in it.
    """
    trace = load_trace(path)
    events = trace_events(trace, path.name)
    of_pytorch, calls = events[events.kind == "user_annotation"], events[events.kind.isin(_CALLS)]
    if of_pytorch.process.nunique() > 1:
        raise ProfileError(
            f"{path.name} is of several processes, whose ids and clocks are their own: read each rank's trace"
        )
    on_gpu = events[events.kind.isin(_KINDS)]
    if on_gpu.empty and len(calls):
        raise ProfileError(
            f"{path.name} has CUDA calls but no GPU kernels: CUPTI could not record; end other profilers "
            "(nsys among them), or allow this user to read GPU performance counters"
        )
    ranges, calls = trace_ranges(events), calls.drop(columns=["kind", "stream"])
    if on_gpu.empty:
        return Profile(ranges, _cpu_operators(events), calls)
    # It is of one process; CUPTI and torch may each have a number of their own for it.
    on_gpu = on_gpu.assign(kind=on_gpu.kind.map(_KINDS)).drop(columns="thread")
    kernels = launched(on_gpu.assign(process=0), calls.assign(process=0))
    return Profile(ranges, kernels.assign(process=of_pytorch.process.min()), calls)


def trace_ranges(events: pd.DataFrame) -> pd.DataFrame:
    """Our ranges among a trace's user annotations, as in a `Profile`."""
    ours = events[(events.kind == "user_annotation") & ~events.name.str.match(FOREIGN)]
    return ours[["process", "thread", "name", "start_ns", "end_ns"]].reset_index(drop=True)


def trace_events(trace: dict[str, Any], name: str) -> pd.DataFrame:
    """The events that are read, by their place: kind, name, process, thread, start_ns, end_ns, _ARGUMENTS.

    Raises:
        ProfileError: some lack a field, a GPU's its stream: a trace of others.
    """
    read = (*_KINDS, *_CALLS, "user_annotation", "cpu_op")
    places = enumerate(trace["traceEvents"])
    found = {at: event for at, event in places if event.get("ph") == "X" and event.get("cat") in read}
    events = pd.DataFrame(found.values(), found.keys(), [*_FIELDS, "args"])
    for field in _ARGUMENTS:
        values = [(event.get("args") or {}).get(field) for event in found.values()]
        events[field] = pd.Series(values, events.index, object)
    events[["ts", "dur"]] = events[["ts", "dur"]].apply(pd.to_numeric, errors="coerce").astype(float)
    lacking = events[_FIELDS].isna().assign(stream=events.stream.isna() & events["cat"].isin(_KINDS))
    for category, of_category in lacking.groupby(events["cat"]):
        if count := of_category.any(axis=1).sum():
            fields = ", ".join(of_category.columns[of_category.any()])
            told = f"{count} of {len(of_category)} events {category!r} lack {fields}"
            raise ProfileError(f"{name}: {told}; without them its sums would be wrong")
    start, end = ((1000 * us).round().astype("int64") for us in (events.ts, events.ts + events.dur))
    events = events.rename(columns={"cat": "kind", "pid": "process", "tid": "thread"})
    return events.drop(columns=["args", "ts", "dur"]).assign(start_ns=start, end_ns=end)


def _cpu_operators(events: pd.DataFrame) -> pd.DataFrame:
    """Operators, with the time they spent themselves by nesting them thread by thread; and Gloo's work."""
    communicates = (events.kind == "user_annotation") & events.name.str.startswith("gloo:")
    operators = events[(events.kind == "cpu_op") | communicates]
    own_ns, is_open = (operators.end_ns - operators.start_ns).to_dict(), defaultdict(list)
    outer_first = operators.sort_values(["start_ns", "end_ns"], ascending=[True, False], kind="stable")
    for event in outer_first.itertuples():
        enclosing = is_open[event.thread]
        while enclosing and event.start_ns >= enclosing[-1].end_ns:
            enclosing.pop()
        if enclosing:
            own_ns[enclosing[-1].Index] -= event.end_ns - event.start_ns
        enclosing.append(event)
    ends = operators.start_ns + pd.Series(own_ns, dtype="int64").clip(lower=0)
    found = operators.assign(end_ns=ends, launch_ns=operators.start_ns, kind="operator")
    found["stream"] = pd.factorize(found.thread, sort=True)[0]
    return found[[not _BOOKKEEPING.search(name) for name in found.name]]
