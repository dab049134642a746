"""Record the memory of a step: the CUDA allocator's history on a GPU, torch.profiler's events on a CPU.

Both are read into one kind of `MemoryHistory`. The GPU's snapshot is what pytorch.org/memory_viz opens.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch

from labbook.files import write_atomically
from labbook.memory.allocations import MemoryHistory, Owners, read_history
from labbook.memory.saved import own_line
from labbook.profiles import torch_trace
from labbook.profiles.table import ProfileError


def record_memory(
    steps: Any, pass_: str, stem: Path | None = None, others: Owners | None = None
) -> MemoryHistory:
    """Record the memory of one step that begins without gradients; warm it up before.

    Args:
        steps: has `model`, `device`, `of(pass_)`, the step and what prepares it; `tensors()`, what lives from
            step to step by its category; and `recording()`, in which its ranges are open.
        stem: leaves <stem>.pickle on a GPU, for pytorch.org/memory_viz.
        others: owners of what else is there when the step begins, as far as it is known.
    """
    step, prepare = steps.of(pass_)
    steps.model.zero_grad(set_to_none=True)
    argument = () if prepare is None else (prepare(),)
    before = {**(others or {}), **owners(steps)}
    if steps.device.type == "cuda":
        snapshot = record_snapshot(lambda: step(*argument), steps)
        if stem is not None:
            write_atomically(stem.with_name(f"{stem.name}.pickle"), pickle.dumps(snapshot))
        return read_snapshot(snapshot, before, owners(steps))
    with TemporaryDirectory(prefix="labbook-memory-") as scratch:
        path = Path(scratch, "step.json.gz")
        with steps.recording():
            torch_trace.record_trace(lambda: step(*argument), path, device="cpu", with_memory=True)
        return read_memory_trace(path, before, owners(steps))


def owners(steps: Any) -> Owners:
    """The storages of parameters, gradients and optimizer state as they are now, by address."""
    return {
        tensor.untyped_storage().data_ptr(): (category, tensor.untyped_storage().nbytes())
        for category, owned in steps.tensors().items()
        for tensor in owned
    }


def record_snapshot(run: Callable[[], Any], steps: Any) -> dict[str, Any]:
    """The CUDA allocator's snapshot after `run()`, with Python frames and with our ranges as annotations."""
    torch.cuda.synchronize(steps.device)
    torch.cuda.memory._record_memory_history(
        stacks="python", max_entries=10**7, clear_history=True, global_record_annotations=True
    )
    try:
        with steps.recording():
            run()
            torch.cuda.synchronize(steps.device)
        return torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def read_snapshot(snapshot: Mapping[str, Any], before: Owners, after: Owners) -> MemoryHistory:
    """Read the CUDA allocator's snapshot of one step; owners when the recording began and ended.

    Raises:
        ProfileError: the snapshot has no history, no ranges, what other versions leave out, or several GPUs.
    """
    signs, changes = {"alloc": 1, "free_requested": -1}, []
    try:
        traces = [trace for trace in snapshot["device_traces"] if trace]
        blocks = chain(*(segment["blocks"] for segment in snapshot["segments"]))
        alive = {b["address"]: b["requested_size"] for b in blocks if b["state"] == "active_allocated"}
        ranges = _annotated_ranges(snapshot["external_annotations"])
    except KeyError as error:
        raise ProfileError(f"the snapshot has no {error}: it is of another version of PyTorch") from None
    if len(traces) != 1:
        raise ProfileError(f"the snapshot has the history of {len(traces)} GPUs; allowed: one")
    for event in traces[0]:
        if sign := signs.get(event["action"]):
            frames = ((f["filename"], f["line"], f["name"]) for f in event.get("frames", ()))
            changes.append((event["time_us"], event["addr"], sign * event["size"], own_line(frames)))
    return read_history(changes, ranges, before, after, alive)


def _annotated_ranges(annotations: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """START and END of record_function ranges, paired by name, innermost first."""
    opened, ranges = defaultdict(list), []
    for annotation in sorted(annotations, key=lambda annotation: annotation["time_us"]):
        name, time = annotation["name"], annotation["time_us"]
        if annotation["stage"] == "START":
            opened[name].append(time)
        elif opened[name]:
            ranges.append((0, name, opened[name].pop(), time))
    frame = pd.DataFrame(ranges, columns=["process", "name", "start_ns", "end_ns"])
    return frame[~frame.name.str.match(torch_trace.FOREIGN)]


def read_memory_trace(path: Path, before: Owners, after: Owners) -> MemoryHistory:
    """Read the memory events of a CPU trace that was recorded `with_memory`; arguments as in `read_snapshot`.

    There `code` stays empty: `range` says where an allocation was made.

    Raises:
        FileNotFoundError, ProfileError: see `torch_trace.load_trace`; or it has no memory events or ranges.
    """
    trace = torch_trace.load_trace(path)
    changes = [
        (event["ts"], event["args"]["Addr"], event["args"]["Bytes"], "")
        for event in trace["traceEvents"]
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    if not changes:
        raise ProfileError(f"{path.name} has no memory events; record it with_memory")
    ranges = torch_trace.trace_ranges(torch_trace.trace_events(trace, path.name))
    ranges[["start_ns", "end_ns"]] /= 1000
    known = {address: size for address, (_, size) in before.items()}
    return read_history(changes, ranges, before, after, known)
