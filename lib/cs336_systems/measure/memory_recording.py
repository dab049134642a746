"""Record the memory of a step: the CUDA allocator's history on a GPU, torch.profiler's events on a CPU.

Both are read into one kind of `MemoryHistory`. The GPU's snapshot is what pytorch.org/memory_viz opens.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.cuda import _memory_viz

from cs336_systems.measure import torch_trace as trace
from cs336_systems.measure.allocations import MemoryHistory, Owners, read_history
from cs336_systems.measure.model_steps import ModelSteps
from cs336_systems.measure.profile import ProfileError
from cs336_systems.nvtx import recording


def record_memory(steps: ModelSteps, pass_: str, stem: Path) -> MemoryHistory:
    """Record the memory of one step that begins without gradients; warm it up before.

    Leaves <stem>.pickle on a GPU, for pytorch.org/memory_viz, or <stem>.json.gz on a CPU.
    """
    step, prepare = steps.of(pass_)
    steps.model.zero_grad(set_to_none=True)
    argument = () if prepare is None else (prepare(),)
    before = owners(steps)
    stem.parent.mkdir(parents=True, exist_ok=True)
    if steps.device.type == "cuda":
        snapshot = _record_cuda(lambda: step(*argument), steps)
        stem.with_name(stem.name + ".pickle").write_bytes(pickle.dumps(snapshot))
        return read_snapshot(snapshot, before, owners(steps), device=steps.device.index or 0)
    path = stem.with_name(stem.name + ".json.gz")
    with recording(steps.model):
        trace.record(lambda: step(*argument), path, device="cpu", with_memory=True)
    return read_memory_trace(path, before, owners(steps))


def owners(steps: ModelSteps) -> dict[int, tuple[str, int]]:
    """The storages of parameters, gradients and optimizer state as they are now, by address."""
    tensors: list[tuple[str, Tensor | None]] = [
        *(("parameters", parameter) for parameter in steps.model.parameters()),
        *(("parameters", buffer) for buffer in steps.model.buffers()),
        *(("gradients", parameter.grad) for parameter in steps.model.parameters()),
        *(
            ("optimizer state", value)
            for state in steps.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ),
    ]
    storages = [(category, tensor.untyped_storage()) for category, tensor in tensors if tensor is not None]
    return {storage.data_ptr(): (category, storage.nbytes()) for category, storage in storages}


def _record_cuda(run: Callable[[], Any], steps: ModelSteps) -> dict[str, Any]:
    """The allocator's snapshot after `run()`, with Python frames and with our ranges as annotations."""
    torch.cuda.synchronize(steps.device)
    torch.cuda.memory._record_memory_history(
        stacks="python", max_entries=10**7, clear_history=True, global_record_annotations=True
    )
    try:
        with recording(steps.model):
            run()
            torch.cuda.synchronize(steps.device)
        return torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def save_viewer(snapshot: Mapping[str, Any], path: Path) -> Path:
    """Write PyTorch's own viewer with the snapshot inside; the page takes its script from the internet."""
    path.write_text(_memory_viz.trace_plot(snapshot))
    return path


def load_snapshot(path: Path) -> dict[str, Any]:
    """A pickled snapshot; only of your own making: unpickling runs what the file says.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: it is cut off, or no snapshot.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no snapshot {path}; make one with measure.memory.record_memory")
    try:
        snapshot = pickle.loads(path.read_bytes())
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError, IndexError) as error:
        raise ProfileError(f"{path.name} is cut off or no snapshot ({error}); record it again") from None
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= set(snapshot):
        raise ProfileError(
            f"{path.name} is a pickle, but no memory snapshot: it has no segments or no device_traces"
        )
    return snapshot


def read_snapshot(
    snapshot: Mapping[str, Any], before: Owners | None = None, after: Owners | None = None, device: int = 0
) -> MemoryHistory:
    """Read the CUDA allocator's snapshot (torch.cuda.memory._snapshot).

    Args:
        snapshot: with the history of one step.
        before, after: who owned what when the recording began and ended; what they do not name is told apart
            by its lifetime.
        device: index of the GPU.

    Raises:
        ProfileError: the snapshot has no history of that device, or none of our ranges.
    """
    traces = snapshot["device_traces"]
    events = traces[device] if device < len(traces) else []
    changes = [
        (event["time_us"], event["addr"], event["size"] * (1 if event["action"] == "alloc" else -1), code)
        for event in events
        if event["action"] in ("alloc", "free_requested")
        for code in [code_of(event.get("frames", ()))]
    ]
    if not changes:
        raise ProfileError(
            f"the snapshot has no history of GPU {device}; record one with measure.memory.record_memory"
        )
    annotations = [a for a in snapshot.get("external_annotations", ()) if a.get("device", device) == device]
    alive = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        if segment.get("device", device) == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    return read_history(changes, _annotated_ranges(annotations), before or {}, after or {}, alive)


def _annotated_ranges(annotations: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """START and END of record_function ranges, paired by name, innermost first."""
    opened, ranges = defaultdict(list), []
    for annotation in sorted(annotations, key=lambda annotation: annotation["time_us"]):
        name, time = annotation["name"], annotation["time_us"]
        if annotation["stage"] == "START":
            opened[name].append(time)
        elif opened[name]:
            ranges.append((0, 0, name, opened[name].pop(), time))
    frame = pd.DataFrame(ranges, columns=["process", "thread", "name", "start_ns", "end_ns"])
    return frame[~frame.name.str.match(trace.FOREIGN)]


def code_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of this library in a stack: "attention/reference.py:37 reference_attention", or "".

    Backward has none: autograd's threads run no Python of ours.
    """
    for frame in frames:
        _, ours, path = frame["filename"].replace("\\", "/").rpartition("cs336_systems/")
        if ours and not path.startswith(("measure/", "ranges.py")):
            return f"{path}:{frame['line']} {frame['name']}"
    return ""


def read_memory_trace(path: Path, before: Owners | None = None, after: Owners | None = None) -> MemoryHistory:
    """Read the memory events of a CPU trace that was recorded `with_memory`; arguments as in `read_snapshot`.

    There `code` stays empty: `range` says where an allocation was made.

    Raises:
        FileNotFoundError, ProfileError: see `trace.load_trace`; or the trace has no memory events, or no
            ranges.
    """
    events = trace.load_trace(path)["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Addr"], event["args"]["Bytes"], "")
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    if not changes:
        raise ProfileError(f"{Path(path).name} has no memory events; record it with_memory")
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    ranges = trace.trace_ranges(annotations)
    if len(ranges):
        ranges = ranges.assign(start_ns=ranges.start_ns / 1000, end_ns=ranges.end_ns / 1000)
    known = {address: size for address, (_, size) in (before or {}).items()}
    return read_history(changes, ranges, before or {}, after or {}, known)
