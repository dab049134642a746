"""Where memory goes: every allocation of a step, who owns it, and the timeline that they add up to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labbook.profiles.table import ProfileError, range_paths
from labbook.timing import MIB

# What memory is used for in training; sharding shares the first three.
CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")

Owners = Mapping[int, tuple[str, int]]  # address of a storage: its category and its bytes
Change = tuple[float, int, int, str]  # time in microseconds, address, bytes (negative: freed), code


@dataclass(frozen=True)
class MemoryHistory:
    """Every allocation of a recorded step.

    Attributes:
        allocations: address, size_bytes, start_us, end_us (infinite while alive at the end), range (path of
            the ranges open when it was made), code (the line of ours that made it) and category, one of
            CATEGORIES: activations are what forward leaves behind for backward, temporary is what lives
            inside one stage, other was there before and belongs to nobody known (inputs, a library's
            workspace).
        stages: name, start_us, end_us of the outermost ranges: forward, backward, optimizer.
    """

    allocations: pd.DataFrame
    stages: pd.DataFrame

    @property
    def start_us(self) -> float:
        """Time of the first thing recorded."""
        return min(self.stages.start_us.min(), self.allocations.start_us[lambda start: start > -np.inf].min())


def read_history(
    changes: list[Change], ranges: pd.DataFrame, before: Owners, after: Owners, alive: Mapping[int, int]
) -> MemoryHistory:
    """Pair allocations with their frees, and find an owner for each.

    Args:
        ranges: as in a `Profile`, but in microseconds.
        before, after: owners when the recording began and ended.
        alive: bytes by address of what lived when the recording ended, or had lived before it.

    Raises:
        ProfileError: there are no ranges.
    """
    if ranges.empty:
        raise ProfileError("the recording has no ranges, so it has no stages; open ranges in it")
    opened: dict[int, tuple[float, int, str]] = {}
    records = []
    for time, address, change, code in sorted(changes, key=lambda change: change[0]):
        if change > 0:
            opened[address] = (time, change, code)
        else:
            start, size, code = opened.pop(address, (-np.inf, -change, ""))
            records.append((address, size, start, time, code))
    records += [(address, size, start, np.inf, code) for address, (start, size, code) in opened.items()]
    known = opened.keys() | {address for address, _, start, _, _ in records if start == -np.inf}
    records += [(address, alive[address], -np.inf, np.inf, "") for address in alive if address not in known]
    columns = ["address", "size_bytes", "start_us", "end_us", "code"]
    allocations = pd.DataFrame(records, columns=columns).sort_values("start_us", ignore_index=True)
    launches = pd.DataFrame({"process": ranges.process.iloc[0], "launch_ns": allocations.start_us})
    allocations["range"], paths = range_paths(ranges, launches)
    outermost = ranges[~paths.str.contains("/", na=True)].sort_values("start_ns", ignore_index=True)
    stages = outermost[["name"]].assign(start_us=outermost.start_ns, end_us=outermost.end_ns)
    # An owner where one is known at either end of the recording, else what the lifetime says.
    category = pd.Series("temporary", index=allocations.index)
    for forward in stages[stages.name == "forward"].itertuples():
        made_in_it = allocations.start_us.between(forward.start_us, forward.end_us)
        category[made_in_it & (allocations.end_us > forward.end_us)] = "activations"
    from_before, at_the_end = allocations.start_us == -np.inf, allocations.end_us == np.inf
    category[from_before] = "other"
    for moment, owners in ((from_before, before), (at_the_end, after)):
        owner = allocations.address.map({address: name for address, (name, _) in owners.items()})
        category = category.mask(moment & owner.notna(), owner)
    return MemoryHistory(allocations.assign(category=category), stages)


def timeline(history: MemoryHistory, points: int | None = 256) -> pd.DataFrame:
    """MiB held by each category over time: at_ms since the recording began, stage, a column per category.

    Thin enough to be kept as rows: its changes are cut into so many pieces, each shown at its largest total,
    so that no peak is lost; None shows all.
    """
    allocations, start_us = history.allocations, history.start_us
    born = allocations.assign(at_us=allocations.start_us.clip(lower=start_us), change=allocations.size_bytes)
    died = allocations[allocations.end_us < np.inf]
    died = died.assign(at_us=died.end_us, change=-died.size_bytes)
    changes = pd.concat([born, died]).pivot_table("change", "at_us", "category", aggfunc="sum", fill_value=0)
    held = changes.reindex(columns=CATEGORIES, fill_value=0).cumsum() / MIB
    stage = pd.Series("", index=held.index)
    for name, start, end in history.stages.itertuples(index=False):
        stage.loc[start:end] = name
    held.insert(0, "at_ms", (held.index - start_us) / 1000)
    held.insert(1, "stage", stage)
    held = held.reset_index(drop=True).rename_axis(columns=None)
    if points is None or len(held) <= points:
        return held
    pieces = held.index * points // len(held)
    largest = held[list(CATEGORIES)].sum(axis=1).groupby(pieces).idxmax()
    return held.loc[largest].reset_index(drop=True)


def timeline_rows(held: pd.DataFrame) -> list[dict[str, Any]]:
    """A timeline as rows, one wherever a category holds more or less than before; and the end in full."""
    now = held[list(CATEGORIES)]
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
    held["total"] = held[list(CATEGORIES)].sum(axis=1)
    records = []
    for name, *times_us in history.stages.itertuples(index=False):
        start, end = ((time - history.start_us) / 1000 for time in times_us)
        # What was held when the stage began counts too: nothing need be allocated in it.
        first = max(held.at_ms.searchsorted(start, side="right") - 1, 0)
        last = held.at_ms.searchsorted(end, side="right")
        records.append({**held.loc[held.total[first:last].idxmax()], "stage": name})
    return pd.DataFrame(records)[["stage", "at_ms", *CATEGORIES, "total"]]


def largest_allocations(history: MemoryHistory, count: int = 10) -> pd.DataFrame:
    """The largest allocations of the recording, equal ones together: size_mib, category, range, code, count.

    Layers are one (layers.*): the same line makes the same allocation in each of them.
    """
    made = history.allocations.query("start_us > -inf")
    layers = made.range.str.replace(r"\.\d+", ".*", regex=True)
    made = made.assign(range=layers, size_mib=made.size_bytes / MIB)
    grouped = made.groupby(["size_mib", "category", "range", "code"]).size().rename("count").reset_index()
    return grouped.sort_values(["size_mib", "count"], ascending=False, ignore_index=True).head(count)
