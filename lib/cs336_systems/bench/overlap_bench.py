"""A profiled step of every rank: what it spends communicating, and how much of that nothing hides."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch.distributed as dist

from cs336_systems.measure.overlap import merged, overlap_values, step_lanes
from cs336_systems.nvtx import annotate, recording
from cs336_systems.parallel import WorkerContext
from labbook.profiles.table import Profile
from labbook.profiles.torch_trace import record
from labbook.timing import synchronize


def profile_lanes(step: Callable[[], None], context: WorkerContext) -> pd.DataFrame:
    """The lanes of this rank (see `measure.overlap.step_lanes`) in one of two steps under torch.profiler."""
    return step_lanes(profile_steps(step, context))


def profile_steps(step: Callable[[], None], context: WorkerContext) -> Profile:
    """Two steps of this rank under torch.profiler, each in a range "measure".

    All ranks call it together, and start each step together. The first step warms the profiler up.
    """

    def two_steps() -> None:
        with recording():
            for _ in range(2):
                dist.barrier()
                synchronize(context.device)
                with annotate("measure"):
                    step()
                    synchronize(context.device)

    with tempfile.TemporaryDirectory(prefix="cs336-lanes-") as folder:
        return record(two_steps, Path(folder) / "trace.json", device=context.device)


def profile_overlap(
    step: Callable[[], None], context: WorkerContext, key: Mapping[str, Any], *, with_timeline: bool
) -> dict[str, list[dict[str, Any]]]:
    """Profile a step, warmed up, on all ranks; `key` are the key columns of what is profiled.

    Returns:
        ddp_overlap: a row for each rank, the same on every rank; ddp_timeline: rows of this rank, or none.
    """
    lanes = profile_lanes(step, context)
    by_rank: list[dict[str, Any]] = [{}] * context.world_size
    dist.all_gather_object(by_rank, overlap_values(lanes))
    return {
        "ddp_overlap": [{**key, "rank": rank} | values for rank, values in enumerate(by_rank)],
        "ddp_timeline": timeline_rows(lanes, {**key, "rank": context.rank}) if with_timeline else [],
    }


def timeline_rows(lanes: pd.DataFrame, key: Mapping[str, Any], gap_ms: float = 0.1) -> list[dict[str, Any]]:
    """Lanes as rows, few enough to keep: gaps under `gap_ms` closed, times to the microsecond."""
    spans = merged(lanes, gap_ms).round({"start_ms": 3, "end_ms": 3})
    spans["span"] = spans.groupby("lane").cumcount()
    return [{**key, **row} for row in spans.to_dict("records")]
