"""Where memory goes: every allocation of a step, who owns it, and the timeline that they add up to.

On a GPU the CUDA allocator records, whose snapshot pytorch.org/memory_viz opens; on a CPU torch.profiler.
"""

import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from labbook.files import write_atomically
from labbook.memory.operations import own_line
from labbook.profiles import torch_trace
from labbook.profiles.table import ProfileError, range_paths
from labbook.timing import MIB

# What memory is used for in training; sharding shares the first three.
CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")

Owners = Mapping[int, tuple[str, int]]  # address of a storage: its category and its bytes
Change = tuple[float, int, int, str]  # time in microseconds, address, bytes (negative: freed), code
_TIMES = ["start_ns", "end_ns"]


class MemoryHistory(NamedTuple):
    """Every allocation of a recorded step.

    allocations: address, size_bytes, start_us, end_us (infinite while alive at the end), range (path of
        the ranges open when it was made), code (the line of ours that made it) and category, one of
        CATEGORIES: activations are what forward leaves behind for backward, temporary is what lives
        inside one stage, other was there before and belongs to nobody known (inputs, a library's
        workspace).
    stages: name, start_us, end_us of the outermost ranges: forward, backward, optimizer.
    """

    allocations: pd.DataFrame
    stages: pd.DataFrame


def record_memory(
    steps: Any, pass_: str, stem: Path | None = None, others: Owners | None = None
) -> MemoryHistory:
    """Record the memory of one step that begins without gradients; warm it up before.

    steps: has `model`, `device`, `of(pass_)`, the step and what prepares it; `tensors()`, what lives from
        step to step by its category; and `recording()`, in which its ranges are open.
    stem: leaves <stem>.pickle on a GPU, for pytorch.org/memory_viz.
    others: owners of what else is there when the step begins, as far as it is known.
    """
    step, prepare = steps.of(pass_)
    steps.model.zero_grad(set_to_none=True)
    argument = () if prepare is None else (prepare(),)
    before = {**(others or {}), **_owners(steps)}
    if steps.device.type == "cuda":
        snapshot = record_snapshot(lambda: step(*argument), steps)
        if stem is not None:
            write_atomically(stem.with_name(f"{stem.name}.pickle"), pickle.dumps(snapshot))
        return read_snapshot(snapshot, before, _owners(steps))
    with TemporaryDirectory(prefix="labbook-memory-") as scratch:
        path = Path(scratch, "step.json.gz")
        with steps.recording():
            torch_trace.record_trace(lambda: step(*argument), path, device="cpu", with_memory=True)
        return read_memory_trace(path, before, _owners(steps))


def _owners(steps: Any) -> Owners:
    """The storages of parameters, gradients and optimizer state as they are now, by address."""
    storages = (
        (name, tensor.untyped_storage()) for name, of in steps.tensors().items() for tensor in of
    )
    return {storage.data_ptr(): (name, storage.nbytes()) for name, storage in storages}


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

    Raises ProfileError: the snapshot has no history, no ranges, or the history of several GPUs.
    """
    traces = [trace for trace in snapshot["device_traces"] if trace]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    alive = {b["address"]: b["requested_size"] for b in blocks if b["state"] == "active_allocated"}
    if len(traces) != 1:
        raise ProfileError(f"the snapshot has the history of {len(traces)} GPUs; allowed: one")
    signs, changes, opened, ranges = {"alloc": 1, "free_requested": -1}, [], defaultdict(list), []
    for event in traces[0]:
        if sign := signs.get(event["action"]):
            frames = ((f["filename"], f["line"], f["name"]) for f in event.get("frames", ()))
            changes.append(
                (event["time_us"], event["addr"], sign * event["size"], own_line(frames))
            )
    for annotation in sorted(
        snapshot["external_annotations"], key=lambda annotation: annotation["time_us"]
    ):
        name, time = annotation["name"], annotation["time_us"]
        if annotation["stage"] == "START":
            opened[name].append(time)
        elif opened[name] and not re.match(torch_trace.FOREIGN, name):
            ranges.append((name, float(opened[name].pop()), float(time)))
    return _history(changes, pd.DataFrame(ranges, columns=["name", *_TIMES]), before, after, alive)


def read_memory_trace(path: Path, before: Owners, after: Owners) -> MemoryHistory:
    """Read the memory events of a CPU trace that was recorded `with_memory`; arguments as in `read_snapshot`.

    There `code` stays empty: `range` says where an allocation was made.
    Raises FileNotFoundError, ProfileError: as `torch_trace.load_trace`; or it has no memory events or ranges.
    """
    trace, events = torch_trace.load_trace(path)
    memory = [e for e in trace if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    changes = [(event["ts"], event["args"]["Addr"], event["args"]["Bytes"], "") for event in memory]
    if not changes:
        raise ProfileError(f"{path.name} has no memory events; record it with_memory")
    ranges = events[events.kind == "range"]
    ranges = ranges[["name"]].assign(**ranges[_TIMES] / 1000)
    return _history(
        changes, ranges, before, after, {address: size for address, (_, size) in before.items()}
    )


def _history(
    changes: list[Change],
    ranges: pd.DataFrame,
    before: Owners,
    after: Owners,
    alive: Mapping[int, int],
) -> MemoryHistory:
    """Pair allocations with their frees, and find an owner for each.

    ranges: as in a `Profile`, but in microseconds.
    before, after: owners when the recording began and ended.
    alive: bytes by address of what lived when the recording ended, or had lived before it.
    """
    if ranges.empty:
        raise ProfileError("the recording has no ranges, so it has no stages; open ranges in it")
    changes = sorted(changes, key=lambda change: change[0])
    first = {address: size for _, address, size, _ in reversed(changes)}
    older = {address: size for address, size in alive.items() if address not in first}
    older |= {address: -size for address, size in first.items() if size < 0}
    changes = [(-np.inf, address, size, "") for address, size in older.items()] + changes
    made = pd.DataFrame(changes, columns=["start_us", "address", "size_bytes", "code"])
    made["end_us"] = (
        made.groupby("address").start_us.shift(-1).fillna(np.inf)
    )  # what is next there, frees it
    made = made[made.size_bytes > 0].reset_index(drop=True)
    launches = pd.DataFrame({"process": 0, "launch_ns": made.start_us})
    paths, made["range"] = range_paths(ranges.assign(process=0), launches)
    stages = ranges[~paths.str.contains("/", na=True)].sort_values("start_ns", ignore_index=True)
    stages = stages[["name", *_TIMES]].set_axis(["name", "start_us", "end_us"], axis=1)
    # An owner where one is known at either end of the recording, else what the lifetime says.
    from_before, at_the_end = made.start_us == -np.inf, made.end_us == np.inf
    made["category"] = np.where(from_before, "other", "temporary")
    for forward in stages[stages.name == "forward"].itertuples():
        in_it = made.start_us.between(forward.start_us, forward.end_us)
        made.loc[in_it & (made.end_us > forward.end_us), "category"] = "activations"
    for moment, owned in ((from_before, before), (at_the_end, after)):
        owner = (
            made.address[moment]
            .map({address: name for address, (name, _) in owned.items()})
            .dropna()
        )
        made.loc[owner.index, "category"] = owner
    return MemoryHistory(made, stages)


def timeline(history: MemoryHistory, points: int | None = 256) -> pd.DataFrame:
    """MiB held by each category over time: at_ms since the recording began, stage, a column per category.

    Thin enough to be kept as rows: its changes are cut into so many pieces, each shown at its largest total,
    so that no peak is lost; None shows all, and what was held when each stage began.
    """
    made, stages = history.allocations, history.stages
    start_us = min(stages.start_us.min(), made.start_us[made.start_us > -np.inf].min())
    born = made.assign(at_us=made.start_us.clip(lower=start_us), change=made.size_bytes)
    died = made[made.end_us < np.inf].assign(at_us=made.end_us, change=-made.size_bytes)
    changes = pd.concat([born, died]).pivot_table(
        "change", "at_us", "category", aggfunc="sum", fill_value=0
    )
    moments = changes.index if points else changes.index.union(stages.start_us)
    held = changes.reindex(moments, columns=CATEGORIES, fill_value=0).cumsum() / MIB
    held = held.assign(at_ms=(moments - start_us) / 1000, stage="")
    for name, start, end in stages.itertuples(index=False):
        held.loc[start:end, "stage"] = name
    held = held.reset_index(drop=True)[["at_ms", "stage", *CATEGORIES]].rename_axis(columns=None)
    pieces = held.index * min(points or len(held), len(held)) // len(held)
    return held.loc[held[[*CATEGORIES]].sum(axis=1).groupby(pieces).idxmax()].reset_index(drop=True)


def timeline_rows(held: pd.DataFrame) -> list[dict[str, Any]]:
    """A timeline as rows, one wherever a category holds more or less than before; and the end in full."""
    now = held[[*CATEGORIES]]
    told = now.ne(now.shift(fill_value=0.0))
    told.iloc[-1] |= now.iloc[-1] > 0
    sparse = held.assign(**now.where(told)).rename_axis("point").reset_index()
    rows = sparse.melt(["point", "at_ms", "stage"], CATEGORIES, "category", "size_mib").dropna()
    return rows.to_dict("records")


def timeline_of_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The timeline that `timeline_rows` made these rows of; they must be of one recording."""
    rows = rows.assign(stage=rows["stage"].fillna(""))
    held = rows.pivot(index=["point", "at_ms", "stage"], columns="category", values="size_mib")
    held = held.reindex(columns=CATEGORIES).ffill().fillna(0.0).rename_axis(columns=None)
    return held.reset_index().drop(columns="point")


def stage_peaks(history: MemoryHistory) -> pd.DataFrame:
    """For each stage the moment of its largest total: stage, at_ms, a column per category (MiB), total."""
    held = timeline(history, points=None)
    held["total"] = held[[*CATEGORIES]].sum(axis=1)
    largest = held[held.stage != ""].groupby("stage", sort=False).total.idxmax()
    return held.loc[largest, ["stage", "at_ms", *CATEGORIES, "total"]].reset_index(drop=True)


def largest_allocations(history: MemoryHistory, count: int = 10) -> pd.DataFrame:
    """The largest allocations of the recording, equal ones together: size_mib, category, range, code, count.

    Layers are one (layers.*): the same line makes the same allocation in each of them.
    """
    made = history.allocations.query("start_us > -inf").eval(f"size_mib = size_bytes / {MIB}")
    made["range"] = made.range.str.replace(r"\.\d+", ".*", regex=True)
    same = made.groupby(["size_mib", "category", "range", "code"]).size().reset_index(name="count")
    return same.sort_values(["size_mib", "count"], ascending=False, ignore_index=True).head(count)
