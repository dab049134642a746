"""torch.profiler: record a trace, for Perfetto and for us, and read it into a `Profile`."""

import gzip
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from labbook.profiles.table import Profile, ProfileError, complete

_KINDS = {
    "user_annotation": "range",
    "cpu_op": "operator",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
}
_ON_GPU = ("kernel", "memcpy", "memset")
# Of every event that is read: its fields, its arguments, and what the columns of a table call them.
_FIELDS = ["cat", "name", "pid", "tid", "ts", "dur"]
_ARGUMENTS = ["correlation", "stream"]
_COLUMNS = ["kind", "name", "process", "thread", "start_ns", "duration_ns"] + _ARGUMENTS
# Ranges that PyTorch opens by itself; a path is made of ours.
FOREIGN = r"Optimizer\.|ProfilerStep|nccl:|gloo:|c10d|Torch-Compiled|DistributedDataParallel|## "
# Operators that touch no data: views, allocations and autograd's own nodes. The host's work, and no kernels.
_BOOKKEEPING = re.compile(
    r"^aten::(view|_?unsafe_view|reshape|_reshape_alias|transpose|t|numpy_T|as_strided|expand|expand_as|unsqueeze|squeeze"
    r"|select|slice|narrow|detach_?|alias|permute|unbind|split|chunk|flatten|unflatten|movedim|swapaxes|view_as|lift_fresh"
    r"|(new_)?(empty|zeros|ones)(_like|_strided)?|resize_|promote_types|real|resolve_(conj|neg)|result_type|item|is_nonzero|set_|diagonal|broadcast\w*)$"
    r"|^detach_?$|^torch::autograd|^autograd::|Backward\d*$|^profiler::|^Torch-|^CompiledFunction|^TorchDynamo"
)


def record_trace(
    run: Callable, path: Path, *, device: torch.device, with_memory: bool = False
) -> Profile:
    """Call `run()` under torch.profiler and save a Chrome trace, .json or .json.gz (for ui.perfetto.dev).

    run: what to profile; warm it up before, and open ranges in it with record_function.
    with_memory: also record every allocation.
    Raises ProfileError: see `read_trace`.
    """
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_cuda:
        activities.append(ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        # torch 2.11 says each time that a profile holds its own events only: that is what is wanted.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        with profile(activities=activities, profile_memory=with_memory) as profiler:
            run()
            if on_cuda:
                torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


def load_trace(path: Path) -> tuple[list[dict], pd.DataFrame]:
    """The events of a trace; and those that are read, by their place, as a `Profile` takes them.

    A range that PyTorch opened is of the kind "pytorch's", what Gloo does on its threads an operator.
    Raises FileNotFoundError; ProfileError: it is cut off, or no trace.
    """
    trace = _load_events(path)
    rows = {
        place: _row(event)
        for place, event in enumerate(trace)
        if event.get("ph") == "X" and event.get("cat") in _KINDS
    }
    events = pd.DataFrame.from_dict(rows, "index", object, columns=_COLUMNS)
    kinds = events.kind.map(_KINDS)
    is_foreign = (kinds == "range") & events.name.str.match(FOREIGN, na=False)
    is_gloos = is_foreign & events.name.str.startswith("gloo:", na=False)
    events["kind"] = kinds.mask(is_foreign, "pytorch's").mask(is_gloos, "operator")
    # Durations are added as integers: since 1970 a float of microseconds is a multiple of 0.25.
    for column in ("start_ns", "duration_ns"):
        times_us = pd.to_numeric(events[column], errors="coerce").astype(float)
        events[column] = (1000 * times_us).round().astype("Int64")
    events["end_ns"] = events.start_ns + events.pop("duration_ns")
    return trace, complete(events, path.name)


def _load_events(path):
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return list(json.load(file)["traceEvents"])
    except (gzip.BadGzipFile, EOFError, ValueError, TypeError, KeyError) as error:
        raise ProfileError(
            f"{path.name} is cut off or no trace ({error!r}); record it again"
        ) from None


def _row(event):
    """The fields and arguments of an event, in the order of the table's columns."""
    arguments = event.get("args") or {}
    return list(map(event.get, _FIELDS)) + list(map(arguments.get, _ARGUMENTS))


def read_trace(path: Path) -> Profile:
    """Read a torch.profiler trace: a GPU's kernels where it has some, else the CPU's operators.

    On a CPU an operator's own time counts, without the operators that it calls, and operators that touch no
    data (views, allocations) are left out: what remains corresponds to a GPU's kernels. A stream is a thread.
    The operator at which a checkpoint stops to compute again is among them, though it computes nothing: one
    call a segment too many.
    Raises FileNotFoundError, ProfileError: see `load_trace` and `Profile`; or it is of several processes.
    """
    _, events = load_trace(path)
    is_range = events.kind.isin(["range", "pytorch's"])
    if events.process[is_range].nunique() > 1:
        raise ProfileError(f"{path.name} is of several processes: read each rank's trace")
    events["process"] = 0  # CUPTI may have another number for it than torch
    if events.kind.isin(_ON_GPU).any():
        return Profile(events[~events.kind.isin(["pytorch's", "operator"])])
    if (events.kind == "call").any():
        raise ProfileError(
            f"{path.name} has calls and no kernels: CUPTI could not record; end other profilers, or "
            "allow this user to read GPU performance counters"
        )
    own_ns = _own_ns(events[events.kind == "operator"])
    events.loc[own_ns.index, "end_ns"] = events.start_ns + own_ns
    events["stream"] = pd.factorize(events.thread, sort=True)[0]
    touches_data = events.name.map(_BOOKKEEPING.search).isna()
    computes = events.index.isin(own_ns.index) & touches_data
    return Profile(events[computes | (events.kind == "range")])


def _own_ns(operators):
    """The time of each operator without that of the operators that it calls.

    One of the caller's own name (it dispatches to itself) is no call: it is left out, its time the caller's.
    Nor is one that a TorchDispatchMode takes: the mode stands in it as "PythonDispatchMode", and both are
    left out. What the mode runs, if it runs anything, is inside that, as operators of their own.
    """
    # An operator stands before those that it calls.
    nested = operators.sort_values(
        ["thread", "start_ns", "end_ns"], ascending=[True, True, False], kind="stable"
    )
    own_ns = (nested.end_ns - nested.start_ns).to_dict()
    open_operators = []
    no_calls = set()
    for operator in nested.itertuples():
        while open_operators and not _is_in(operator, open_operators[-1]):
            open_operators.pop()
        if open_operators:
            caller = open_operators[-1]
            if caller.name == operator.name:
                no_calls.add(operator.Index)
                continue
            if operator.name == "PythonDispatchMode":
                no_calls |= {operator.Index, caller.Index}
            own_ns[caller.Index] -= operator.end_ns - operator.start_ns
        open_operators.append(operator)
    return pd.Series(own_ns, dtype="int64").drop(list(no_calls)).clip(lower=0)


def _is_in(operator, caller):
    return operator.thread == caller.thread and operator.start_ns < caller.end_ns
