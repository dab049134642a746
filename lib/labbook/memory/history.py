"""Where memory goes: every allocation of a step, who owns it, and the timeline that they add up to.

On a GPU the CUDA allocator records, whose snapshot pytorch.org/memory_viz opens; on a CPU torch.profiler.
"""

import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from labbook.files import write_atomically
from labbook.memory.operations import own_line
from labbook.profiles import torch_trace
from labbook.profiles.table import range_paths
from labbook.timing import MIB

# What memory is used for in training; sharding shares the first three.
CATEGORIES = [
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporary",
    "other",
]

Owners = dict[int, tuple[str, int]]  # address of a storage: its category and its bytes


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
    steps, pass_: str, stem: Path | None = None, others: Owners | None = None
) -> MemoryHistory:
    """Record the memory of one step that begins without gradients; warm it up before.

    steps: has `model`, `device`, `of(pass_)`, the step and what prepares it; `tensors()`, what lives from
        step to step by its category; and `recording()`, in which its ranges are open.
    stem: leaves <stem>.pickle on a GPU, for pytorch.org/memory_viz.
    others: owners of what else is there when the step begins, as far as it is known.
    """
    step, prepare = steps.of(pass_)
    steps.model.zero_grad(set_to_none=True)
    run = step if prepare is None else partial(step, prepare())
    before = (others or {}) | owners_of(steps.tensors())
    if steps.device.type == "cuda":
        snapshot = _recorded(run, steps)
        if stem:
            write_atomically(Path(f"{stem}.pickle"), pickle.dumps(snapshot))
        return read_snapshot(snapshot, before, owners_of(steps.tensors()))
    with TemporaryDirectory() as scratch, steps.recording():
        path = Path(scratch, "step.json")
        torch_trace.record_trace(run, path, device=steps.device, with_memory=True)
        return _read_memory_trace(path, before, owners_of(steps.tensors()))


def owners_of(categories: Mapping[str, Iterable[Tensor]]) -> Owners:
    """The storages of the tensors of each category as they are now, by address."""
    owners = {}
    for category, tensors in categories.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            owners[storage.data_ptr()] = (category, storage.nbytes())
    return owners


def _recorded(run, steps):
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


def read_snapshot(snapshot: Mapping, before: Owners, after: Owners) -> MemoryHistory:
    """Read the CUDA allocator's snapshot of a step on one GPU; owners when it began and ended."""
    (trace,) = filter(None, snapshot["device_traces"])
    alive = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    changes = [_change(event) for event in trace if event["action"] in _SIGNS]
    ranges = _annotated_ranges(snapshot["external_annotations"])
    return _history(changes, ranges, before, after, alive)


_SIGNS = {"alloc": 1, "free_requested": -1}


def _change(event):
    """Time in microseconds, address, bytes (negative: freed), and code."""
    frames = map(itemgetter("filename", "line", "name"), event.get("frames", ()))
    size = _SIGNS[event["action"]] * event["size"]
    _, code = own_line(frames)
    return float(event["time_us"]), event["addr"], size, code


def _annotated_ranges(annotations):
    """Our ranges: name, start, end, in microseconds; of one name the last opened ends first."""
    open_us = defaultdict(list)
    ranges = []
    for annotation in sorted(annotations, key=itemgetter("time_us")):
        name = annotation["name"]
        time_us = float(annotation["time_us"])
        if annotation["stage"] == "START":
            open_us[name].append(time_us)
        elif open_us[name] and not re.match(torch_trace.FOREIGN, name):
            ranges.append((name, open_us[name].pop(), time_us))
    return pd.DataFrame(ranges, columns=["name", "start", "end"])


def _read_memory_trace(path, before, after):
    """Read the memory events of a CPU trace that was recorded `with_memory`; arguments as in `read_snapshot`.

    There `code` stays empty: `range` says where an allocation was made.
    Raises FileNotFoundError, ProfileError: as `torch_trace.load_trace`.
    """
    trace, events = torch_trace.load_trace(path)
    changes = []
    for event in trace:
        arguments = event.get("args")
        if event.get("name") == "[memory]" and arguments["Device Type"] == 0:
            changes.append((float(event["ts"]), arguments["Addr"], arguments["Bytes"], ""))
    ranges = events.query("kind == 'range'")
    ranges = ranges[["name"]].assign(start=ranges.start_ns / 1000, end=ranges.end_ns / 1000)
    alive = {address: size for address, (_, size) in before.items()}
    return _history(changes, ranges, before, after, alive)


def _history(changes, ranges, before, after, alive):
    """Pair allocations with their frees, and find an owner for each.

    changes: as `_change` gives them. ranges: as `_annotated_ranges` does.
    before, after: owners when the recording began and ended.
    alive: bytes by address of what lived when the recording ended, or had lived before it.
    """
    allocations = _pairs(changes, alive)
    moments = pd.DataFrame({"process": 0, "at": allocations.start_us})
    paths, allocations["range"] = range_paths(ranges.assign(process=0), moments)
    stages = ranges[~paths.str.contains("/", na=True)].sort_values("start", ignore_index=True)
    stages = stages.set_axis(["name", "start_us", "end_us"], axis=1)
    allocations["category"] = _categories(allocations, stages, before, after)
    return MemoryHistory(allocations, stages)


def _pairs(changes, alive):
    """A row for each allocation, until what comes next at its address: that frees it."""
    changes = sorted(changes, key=itemgetter(0))
    first_sizes = {}
    for _, address, size, _ in changes:
        first_sizes.setdefault(address, size)
    # What was there before is never mentioned, or freed before anything else.
    earlier = [
        (-np.inf, address, abs(size), "")
        for address, size in (alive | first_sizes).items()
        if address not in first_sizes or size < 0
    ]
    events = pd.DataFrame(earlier + changes, columns=["start_us", "address", "size_bytes", "code"])
    events["end_us"] = events.groupby("address").start_us.shift(-1, fill_value=np.inf)
    return events[events.size_bytes > 0].reset_index(drop=True)


def _categories(allocations, stages, before, after):
    """An owner where one is known at either end of the recording, else what the lifetime says."""
    is_older = allocations.start_us == -np.inf
    category = pd.Series("temporary", allocations.index).mask(is_older, "other")
    for forward in stages[stages.name == "forward"].itertuples():
        in_forward = allocations.start_us.between(forward.start_us, forward.end_us)
        outlives_it = allocations.end_us > forward.end_us
        category = category.mask(in_forward & outlives_it, "activations")
    is_alive = allocations.end_us == np.inf
    # The later owner goes before the earlier one, and either before the lifetime.
    for is_there, owners in ((is_older, before), (is_alive, after)):
        names = {address: name for address, (name, _) in owners.items()}
        category = allocations.address.map(names).astype(object).where(is_there).fillna(category)
    return category


def timeline(history: MemoryHistory, points: int = 256) -> pd.DataFrame:
    """MiB held by each category over time: at_ms since the first stage began, stage, a column per category.

    Thin enough to be kept as rows: its changes are cut into so many pieces, each shown at its largest total,
    so that no peak is lost.
    """
    held = _held(_changes(history), history.stages)
    piece = held.index * points // len(held)
    largest = held[CATEGORIES].sum(axis=1).groupby(piece).idxmax()
    return held.loc[largest].reset_index(drop=True)


def _held(changes, stages):
    """The whole timeline, a row for each change."""
    held = changes.cumsum() / MIB
    held.insert(0, "at_ms", (held.index - stages.start_us.min()) / 1000)
    held.insert(1, "stage", "")
    for stage in stages.itertuples():
        held.loc[stage.start_us : stage.end_us, "stage"] = stage.name
    return held.reset_index(drop=True)


def _changes(history):
    """Bytes by which each category (a column) changes at each moment (the index, in microseconds).

    What was there before the first stage is there when that begins.
    """
    allocations = history.allocations
    births = allocations.assign(at_us=allocations.start_us)
    deaths = allocations.assign(at_us=allocations.end_us, size_bytes=-allocations.size_bytes)
    changes = pd.concat([births, deaths[deaths.at_us < np.inf]])
    changes["at_us"] = changes.at_us.clip(lower=history.stages.start_us.min())
    sums = changes.pivot_table("size_bytes", "at_us", "category", "sum")
    return sums.reindex(columns=CATEGORIES).fillna(0)


def timeline_rows(held: pd.DataFrame) -> list[dict]:
    """A timeline as rows, one wherever a category holds more or less than before; and the end in full."""
    sizes = held[CATEGORIES]
    has_changed = sizes.ne(sizes.shift(fill_value=0.0))
    has_changed.iloc[-1] |= sizes.iloc[-1] > 0
    sparse = held.assign(**sizes.where(has_changed)).rename_axis("point").reset_index()
    rows = sparse.melt(["point", "at_ms", "stage"], CATEGORIES, "category", "size_mib").dropna()
    return rows.to_dict("records")


def timeline_of_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The timeline that `timeline_rows` made these rows of, by point; they must be of one recording."""
    rows = rows.assign(stage=rows["stage"].fillna(""))
    held = rows.pivot(index=["point", "at_ms", "stage"], columns="category", values="size_mib")
    held = held.reindex(columns=CATEGORIES).ffill().fillna(0.0)
    return held.reset_index(["at_ms", "stage"])


def stage_peaks(history: MemoryHistory) -> pd.DataFrame:
    """For each stage the moment of its largest total: at_ms, stage, a column per category (MiB), total."""
    changes = _changes(history)
    # A stage may change nothing; it holds what there is when it begins.
    moments = changes.index.union(history.stages.start_us)
    held = _held(changes.reindex(moments, fill_value=0), history.stages)
    held["total"] = held[CATEGORIES].sum(axis=1)
    of_stages = held[held.stage != ""].groupby("stage", sort=False)
    return held.loc[of_stages.total.idxmax()].reset_index(drop=True)


def largest_allocations(history: MemoryHistory) -> pd.DataFrame:
    """The ten largest allocations, equal ones as one: size_mib, category, range, code, count.

    Layers are one (layers.*): the same line makes the same allocation in each of them.
    """
    allocations = history.allocations.query("start_us > -@np.inf")
    layers = allocations.range.str.replace(r"\.\d+", ".*", regex=True)
    sizes = allocations.assign(range=layers, size_mib=allocations.size_bytes / MIB)
    counts = sizes.value_counts(["size_mib", "category", "range", "code"]).reset_index()
    return counts.nlargest(10, ["size_mib", "count"]).reset_index(drop=True)
