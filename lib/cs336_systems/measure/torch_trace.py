"""torch.profiler: record a trace, for Perfetto and for us, and read it into a `Profile`."""

import gzip
import json
import os
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

from cs336_systems.measure.profile import Profile, ProfileError
from labbook.files import make_folder

_HOST = "recorded_on"  # the host's name, by our hand: torch 2.11 leaves out its own "host_name"
_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
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


def record(
    run: Callable[[], Any], path: Path, *, device: torch.device | str, with_memory: bool = False
) -> Profile:
    """Call `run()` under torch.profiler and save a Chrome trace, .json or .json.gz (for ui.perfetto.dev).

    Args:
        run: what to profile; warm it up before, and open ranges in it (`nvtx.recording`).
        with_memory: also record every allocation, for `memory_recording.read_memory_trace`.

    Raises:
        ProfileError: see `read_trace`.
    """
    on_cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own log goes to stderr
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
    """
    trace = load_trace(path)
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in spans if (event["cat"], event["name"]) == ("user_annotation", "measure")]
    step = max(steps, key=lambda event: event["ts"])
    on_cuda = any(event["cat"] in _KINDS for event in spans)
    host = {"user_annotation", "cuda_runtime", "cuda_driver"} if on_cuda else {"user_annotation", "cpu_op"}
    inside = [e for e in spans if e["cat"] in host and step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    launched = {event.get("args", {}).get("correlation") for event in inside} - {None}
    inside += [e for e in spans if e["cat"] in _KINDS and e["args"].get("correlation") in launched]
    for event in inside:
        args = event.get("args", {})
        event["args"] = {name: args[name] for name in ("correlation", "grid", "stream") if name in args}
    small = {name: trace[name] for name in ["deviceProperties" if on_cuda else _HOST] if name in trace}
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
        FileNotFoundError, ProfileError: see `load_trace`; or there are no kernels or no ranges.
    """
    trace = load_trace(path)
    events = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            events[event["cat"]].append(event)
    has_kernels = any(events[category] for category in _KINDS)
    if not has_kernels and (events["cuda_runtime"] or events["cuda_driver"]):
        raise ProfileError(
            f"{path.name} has CUDA calls but no GPU kernels: CUPTI could not record; end other profilers "
            "(nsys among them), or allow this user to read GPU performance counters"
        )
    devices = {device["name"] for device in trace.get("deviceProperties", ())}
    return Profile(
        source="torch cuda" if has_kernels else "torch cpu",
        machine=", ".join(sorted(devices)) if has_kernels else trace.get(_HOST, "unknown"),
        ranges=trace_ranges(events["user_annotation"]),
        kernels=pd.DataFrame(_gpu_kernels(events) if has_kernels else _cpu_operators(events)),
    )


def trace_ranges(annotations: list[dict[str, Any]]) -> pd.DataFrame:
    """Our ranges among a trace's user annotations."""
    ranges = [
        (event["pid"], event["tid"], event["name"], _ns(event["ts"]), _ns(event["ts"] + event["dur"]))
        for event in annotations
        if not FOREIGN.match(event["name"])
    ]
    return pd.DataFrame(ranges, columns=["process", "thread", "name", "start_ns", "end_ns"])


def _gpu_kernels(events: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Kernels, copies and fills, each with the time and thread of the CUDA call that launched it."""
    calls = events["cuda_runtime"] + events["cuda_driver"]
    launches = {event.get("args", {}).get("correlation"): event for event in calls}
    # One trace is of one process; CUPTI and torch may each have a number of their own for it.
    process = next((event["pid"] for event in events["user_annotation"]), 0)
    records = []
    for event, kind in ((event, kind) for category, kind in _KINDS.items() for event in events[category]):
        args = event["args"]
        grid = ",".join(map(str, args.get("grid", [])))
        launch = launches.get(args.get("correlation"), event)
        records.append(_launch(event, kind, process, launch, event["dur"], grid, args["stream"]))
    return records


def _cpu_operators(events: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
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
