"""torch.profiler: record a trace, for Perfetto and for us, and read it into a `Profile`."""

import gzip
import json
import platform
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
from labbook.profiles.table import STEP, Profile, ProfileError

_HOST = "recorded_on"  # the host's name, by our hand: torch 2.11 leaves out its own "host_name"
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
            profiler.add_metadata_json(_HOST, json.dumps(platform.node()))
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
    steps = events[(events["cat"] == "user_annotation") & (events.name == STEP)]
    if steps.empty:
        raise ProfileError(f"{path.name} has no step to keep: no range {STEP!r} was recorded in it")
    step, on_gpu = steps.loc[steps.ts.idxmax()], events["cat"].isin(_KINDS)
    host = events["cat"].isin(["user_annotation", *(_CALLS if on_gpu.any() else ["cpu_op"])])
    inside = host & (events.ts >= step.ts) & (events.ts < step.ts + step.dur)
    launched = on_gpu & events.correlation.isin(events.correlation[inside].dropna())
    small = {name: trace[name] for name in ["deviceProperties" if on_gpu.any() else _HOST] if name in trace}
    small["traceEvents"] = [event for event in trace["traceEvents"] if event.get("ph") == "M"]
    for event in events[inside | launched].astype(object).to_dict("records"):
        args = {name: value for name in _ARGUMENTS if pd.notna(value := event.pop(name))}
        small["traceEvents"].append({"ph": "X", **event, "args": args})
    write_atomically(kept, gzip.compress(json.dumps(small, separators=(",", ":")).encode(), mtime=0))


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
    """Read a torch.profiler trace; with GPU kernels in it the source is "torch cuda", without "torch cpu".

    On a CPU an operator's own time counts, without the operators that it calls, and operators that touch no
    data (views, allocations) are left out: what remains corresponds to a GPU's kernels. A stream is a thread.
    Gloo communicates on threads of its own, and what it does there counts like NCCL's kernels.

    Raises:
        FileNotFoundError, ProfileError: see `load_trace`; there are no kernels or no ranges; events lack what
            every such event has; or several processes are merged in it.
    """
    trace = load_trace(path)
    events = trace_events(trace, path.name)
    annotations, calls = events[events["cat"] == "user_annotation"], events[events["cat"].isin(_CALLS)]
    if annotations.pid.nunique() > 1:
        raise ProfileError(
            f"{path.name} is of several processes, whose ids and clocks are their own: read each rank's trace"
        )
    has_kernels = events["cat"].isin(_KINDS).any()
    if not has_kernels and len(calls):
        raise ProfileError(
            f"{path.name} has CUDA calls but no GPU kernels: CUPTI could not record; end other profilers "
            "(nsys among them), or allow this user to read GPU performance counters"
        )
    devices = {device.get("name", "a GPU without a name") for device in trace.get("deviceProperties", ())}
    return Profile(
        source="torch cuda" if has_kernels else "torch cpu",
        machine=", ".join(sorted(devices)) if has_kernels else trace.get(_HOST, "unknown"),
        ranges=trace_ranges(events),
        kernels=_gpu_kernels(events) if has_kernels else _cpu_operators(events),
        calls=_timed(calls),
    )


def trace_ranges(events: pd.DataFrame) -> pd.DataFrame:
    """Our ranges among a trace's user annotations, as in a `Profile`."""
    ours = (events["cat"] == "user_annotation") & ~events.name.str.match(FOREIGN)
    return _timed(events[ours])


def _timed(events: pd.DataFrame) -> pd.DataFrame:
    """Events as a `Profile` has them, in nanoseconds."""
    starts, ends = _ns(events.ts), _ns(events.ts + events.dur)
    named = {"process": events.pid, "thread": events.tid, "name": events.name}
    return pd.DataFrame({**named, "start_ns": starts, "end_ns": ends}).reset_index(drop=True)


def _ns(microseconds: pd.Series) -> pd.Series:
    return (microseconds * 1000).round().astype("int64")


def trace_events(trace: dict[str, Any], name: str) -> pd.DataFrame:
    """The events that are read: _FIELDS and _ARGUMENTS; of others' traces, too, whose events may lack fields.

    Raises:
        ProfileError: some lack a field, a GPU's its stream.
    """
    read = (*_KINDS, *_CALLS, "user_annotation", "cpu_op")
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in read]
    events = pd.DataFrame(found, columns=[*_FIELDS, "args"])
    for field in _ARGUMENTS:
        events[field] = pd.Series([(event.get("args") or {}).get(field) for event in found], dtype=object)
    events[["ts", "dur"]] = events[["ts", "dur"]].apply(pd.to_numeric, errors="coerce").astype(float)
    lacking = events[_FIELDS].isna().assign(stream=events.stream.isna() & events["cat"].isin(_KINDS))
    for category, of_category in lacking.groupby(events["cat"]):
        if count := of_category.any(axis=1).sum():
            fields = ", ".join(of_category.columns[of_category.any()])
            told = f"{count} of {len(of_category)} events {category!r} lack {fields}"
            raise ProfileError(f"{name}: {told}; without them its sums would be wrong")
    return events.drop(columns="args")


def _gpu_kernels(events: pd.DataFrame) -> pd.DataFrame:
    """Kernels, copies and fills, each with the time and thread of the CUDA call that launched it.

    An id may be carried by several calls, and come again: the last that began before the kernel launched it.
    """
    calls = events[events["cat"].isin(_CALLS)].sort_values("ts", kind="stable").assign(called=events.ts)
    gpu = events[events["cat"].isin(_KINDS)].sort_values("ts", kind="stable")
    calls = calls.dropna(subset="correlation")[["ts", "correlation", "called", "tid"]]
    launched = pd.merge_asof(gpu, calls, on="ts", by="correlation", suffixes=("_of_gpu", ""))
    launched = launched.fillna({"called": launched.ts, "tid": launched.tid_of_gpu})
    # One trace is of one process; CUPTI and torch may each have a number of their own for it.
    process = events.pid[events["cat"] == "user_annotation"].min()
    more = {"kind": launched["cat"].map(_KINDS), "stream": launched.stream}
    return _timed(launched).assign(process=process, launch_ns=_ns(launched.called), **more)


def _cpu_operators(events: pd.DataFrame) -> pd.DataFrame:
    """Operators, with the time they spent themselves by nesting them thread by thread; and Gloo's work."""
    communicates = (events["cat"] == "user_annotation") & events.name.str.startswith("gloo:")
    operators = pd.concat([events[events["cat"] == "cpu_op"], events[communicates]], ignore_index=True)
    own_us, open_on = operators.dur.to_dict(), defaultdict(list)
    for event in operators.sort_values(["ts", "dur"], ascending=[True, False], kind="stable").itertuples():
        enclosing = open_on[event.tid]
        while enclosing and event.ts >= enclosing[-1].ts + enclosing[-1].dur:
            enclosing.pop()
        if enclosing:
            own_us[enclosing[-1].Index] -= event.dur
        enclosing.append(event)
    threads = {thread: number for number, thread in enumerate(sorted(open_on))}
    frame = _timed(operators.assign(dur=pd.Series(own_us, dtype=float).clip(lower=0)))
    found = frame.assign(launch_ns=frame.start_ns, kind="operator", stream=frame.thread.map(threads))
    return found[[not _BOOKKEEPING.search(name) for name in found.name]]
