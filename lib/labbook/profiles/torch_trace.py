"""torch.profiler: record a trace, for Perfetto and for us, and read it into a `Profile`."""

import gzip
import json
import os
import platform
import re
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from labbook.files import make_folder
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
Events = dict[str, list[dict[str, Any]]]
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own log goes to stderr, from its first use on


def record(
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
    events = _by_category(trace, path.name)
    steps = [event for event in events["user_annotation"] if event["name"] == STEP]
    if not steps:
        raise ProfileError(f"{path.name} has no step to keep: no range {STEP!r} was recorded in it")
    step = max(steps, key=lambda event: event["ts"])
    gpu = [event for category in _KINDS for event in events[category]]
    host = [e for category in ["user_annotation", *(_CALLS if gpu else ["cpu_op"])] for e in events[category]]
    inside = [e for e in host if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    launched = {_args(event).get("correlation") for event in inside} - {None}
    inside += [event for event in gpu if _args(event).get("correlation") in launched]
    for event in inside:
        event["args"] = {k: v for k, v in _args(event).items() if k in ("correlation", "grid", "stream")}
    small = {name: trace[name] for name in ["deviceProperties" if gpu else _HOST] if name in trace}
    small["traceEvents"] = [event for event in trace["traceEvents"] if event.get("ph") == "M"] + inside
    make_folder(kept.parent)
    kept.write_bytes(gzip.compress(json.dumps(small, separators=(",", ":")).encode(), mtime=0))


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
    events = _by_category(trace, path.name)
    if len({event["pid"] for event in events["user_annotation"]}) > 1:
        raise ProfileError(
            f"{path.name} is of several processes, whose ids and clocks are their own: read each rank's trace"
        )
    has_kernels = any(events[category] for category in _KINDS)
    if not has_kernels and any(events[category] for category in _CALLS):
        raise ProfileError(
            f"{path.name} has CUDA calls but no GPU kernels: CUPTI could not record; end other profilers "
            "(nsys among them), or allow this user to read GPU performance counters"
        )
    devices = {device.get("name", "a GPU without a name") for device in trace.get("deviceProperties", ())}
    return Profile(
        source="torch cuda" if has_kernels else "torch cpu",
        machine=", ".join(sorted(devices)) if has_kernels else trace.get(_HOST, "unknown"),
        ranges=trace_ranges(events["user_annotation"]),
        kernels=pd.DataFrame(_gpu_kernels(events) if has_kernels else _cpu_operators(events)),
        calls=trace_ranges([event for category in _CALLS for event in events[category]]),
    )


def trace_ranges(annotations: list[dict[str, Any]]) -> pd.DataFrame:
    """Our ranges among a trace's user annotations."""
    ranges = [
        (event["pid"], event["tid"], event["name"], _ns(event["ts"]), _ns(event["ts"] + event["dur"]))
        for event in annotations
        if not FOREIGN.match(event["name"])
    ]
    return pd.DataFrame(ranges, columns=["process", "thread", "name", "start_ns", "end_ns"])


def _by_category(trace: dict[str, Any], name: str) -> Events:
    """The events that are read, by category; of others' traces, too, whose events may lack fields."""
    events: Events = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in (*_KINDS, *_CALLS, "user_annotation", "cpu_op"):
            events[event["cat"]].append(event)
    for category, found in events.items():
        wanted = {"name", "pid", "tid", "ts", "dur"} | ({"stream"} if category in _KINDS else set())
        lacking = [wanted - {*event, *_args(event)} for event in found]
        if any(lacking):
            fields = ", ".join(sorted(set().union(*lacking)))
            count = f"{sum(map(bool, lacking))} of {len(found)} events {category!r}"
            raise ProfileError(f"{name}: {count} lack {fields}; without them its sums would be wrong")
    return events


def _args(event: dict[str, Any]) -> dict[str, Any]:
    return event.get("args") or {}


def _gpu_kernels(events: Events) -> list[dict[str, Any]]:
    """Kernels, copies and fills, each with the time and thread of the CUDA call that launched it.

    An id may be carried by several calls, and come again: the last that began before the kernel launched it.
    """
    launches = defaultdict(list)
    for event in sorted((e for category in _CALLS for e in events[category]), key=lambda e: e["ts"]):
        launches[_args(event).get("correlation")].append(event)
    # One trace is of one process; CUPTI and torch may each have a number of their own for it.
    process = next((event["pid"] for event in events["user_annotation"]), 0)
    records = []
    for event, kind in ((event, kind) for category, kind in _KINDS.items() for event in events[category]):
        args = _args(event)
        calls = launches.get(args.get("correlation"), [event])
        launch = calls[max(0, bisect_right([call["ts"] for call in calls], event["ts"]) - 1)]
        grid = ",".join(map(str, args.get("grid", [])))
        records.append(_launch(event, kind, process, launch, event["dur"], grid, args["stream"]))
    return records


def _cpu_operators(events: Events) -> list[dict[str, Any]]:
    """Operators, with the time they spent themselves by nesting them thread by thread; and Gloo's work."""
    operators = events["cpu_op"] + [e for e in events["user_annotation"] if e["name"].startswith("gloo:")]
    own_time, open_on = {}, defaultdict(list)
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        enclosing = open_on[event["tid"]]
        while enclosing and event["ts"] >= enclosing[-1]["ts"] + enclosing[-1]["dur"]:
            enclosing.pop()
        own_time[id(event)] = event["dur"]
        if enclosing:
            own_time[id(enclosing[-1])] -= event["dur"]
        enclosing.append(event)
    threads = {thread: number for number, thread in enumerate(sorted(open_on))}
    return [
        _launch(e, "operator", e["pid"], e, max(0.0, own_time[id(e)]), "", threads[e["tid"]])
        for e in operators
        if not _BOOKKEEPING.search(e["name"])
    ]


def _launch(
    event: dict, kind: str, process: int, launch: dict, duration: float, grid: str, stream: int
) -> dict[str, Any]:
    """A row of `Profile.kernels`; `launch` is the event that started this one, maybe itself."""
    start, end = _ns(event["ts"]), _ns(event["ts"] + duration)
    return {
        "name": event["name"], "kind": kind, "process": process, "thread": launch["tid"],
        "launch_ns": _ns(launch["ts"]), "start_ns": start, "end_ns": end, "grid": grid, "stream": stream,
    }  # fmt: skip


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
