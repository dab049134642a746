"""A profiled step of every rank: what it spends communicating, and how much of that nothing hides."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from cs336_systems.measure import torch_trace as trace
from cs336_systems.measure.overlap import merged, overlap, step_lanes
from cs336_systems.measure.rows import save_rows
from cs336_systems.nvtx import annotate, recording
from cs336_systems.parallel.worker import WorkerContext

PROFILES = "ddp_overlap_individual_parameters_benchmarking"  # the slug under which the tables live


def profile_lanes(step: Callable[[], None], context: WorkerContext) -> pd.DataFrame:
    """The lanes of this rank (see `measure.overlap.step_lanes`) in one of two steps under torch.profiler.

    All ranks call it together, and start each step together. The first step warms the profiler up.
    """

    def two_steps() -> None:
        with recording():
            for _ in range(2):
                dist.barrier()
                _synchronize(context)
                with annotate("measure"):
                    step()
                    _synchronize(context)

    with tempfile.TemporaryDirectory(prefix="cs336-lanes-") as folder:
        profile = trace.record(two_steps, Path(folder) / "trace.json", device=context.device)
    return step_lanes(profile)


def profiled(
    step: Callable[[], None],
    context: WorkerContext,
    key: Mapping[str, Any],
    machine: str | None,
    *,
    keep_timeline: bool,
) -> dict[str, Any]:
    """Profile a step on all ranks; returns value columns, the same on every rank.

    Args:
        step: the step to profile, warmed up.
        key: key columns of what is profiled.
        machine: save each rank's numbers as table "profiles", and the lanes of rank 0 as table "timeline";
            None saves nothing.
        keep_timeline: whether the lanes are worth keeping.

    Returns:
        The columns of `measure.overlap.overlap`, of the rank with most exposed communication.
    """
    lanes = profile_lanes(step, context)
    by_rank: list[dict[str, Any]] = [{}] * context.world_size
    dist.all_gather_object(by_rank, overlap(lanes))
    if machine and context.rank == 0:
        rows = [dict(key) | {"rank": rank} | values for rank, values in enumerate(by_rank)]
        save_rows(rows, PROFILES, machine=machine, table="profiles")
        if keep_timeline:
            this_rank = dict(key) | {"rank": 0}
            rows = timeline_rows(lanes, this_rank)
            save_rows(rows, PROFILES, machine=machine, table="timeline", replacing=this_rank)
    return max(by_rank, key=lambda values: values["profiled_exposed_ms"])


def timeline_rows(lanes: pd.DataFrame, key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lanes as rows, few enough to keep: gaps under 0.1 ms closed, times to the microsecond."""
    spans = merged(lanes, gap_ms=0.1).round({"start_ms": 3, "end_ms": 3})
    spans["span"] = spans.groupby("lane").cumcount()
    return [{**key, **row} for row in spans.to_dict("records")]


def _synchronize(context: WorkerContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
