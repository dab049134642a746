"""Rows of collectives and of data-parallel training, chosen and related: fits, bucket sizes, efficiency."""

from typing import Any

import pandas as pd

from cs336_systems.accounting.collective_costs import MB, AlphaBeta, fit_alpha_beta
from cs336_systems.measure.overlap import overlap_values
from cs336_systems.report.compare import with_model, with_wrapper

# What must be equal for two rows to be the same work.
_WORK = ["edition", "model_size", "context_length", "dtype", "attention"]


def fit_collective(
    rows: pd.DataFrame, *, collective: str = "all_reduce", world_size: int = 2, backend: str = "nccl"
) -> AlphaBeta:
    """Latency and bandwidth that fit the median times of one collective in rows of collective_times.

    Raises:
        ValueError: there are fewer than two sizes of it.
    """
    wanted = "collective == @collective and world_size == @world_size and backend == @backend"
    measured = rows.query(f"{wanted} and status == 'ok'").sort_values("message_mb")
    return fit_alpha_beta(
        measured["message_mb"].to_numpy(float) * MB, measured["p50_ms"].to_numpy(float) / 1e3
    )


def on_gpus(
    rows: pd.DataFrame, world_size: int = 2, batch_size: int = 4, context_length: int = 512
) -> pd.DataFrame:
    """Measured rows over NCCL at one setting, the handout's by default, with `model` and `wrapper`.

    Of models with plain attention, as the handout has them.
    """
    setting = "world_size == @world_size and batch_size == @batch_size and context_length == @context_length"
    found = rows.query(f"{setting} and backend == 'nccl' and status == 'ok' and attention == 'plain'")
    return with_wrapper(with_model(found))


def of_run(rows: pd.DataFrame, **chosen: Any) -> pd.DataFrame:
    """The rows of one run of a notebook, with `wrapper`: each column has a value that was asked for.

    An empty cell passes: wrappers without buckets have no bucket size.
    """
    for name, values in chosen.items():
        rows = rows[rows[name].isna() | rows[name].isin(values if isinstance(values, list) else [values])]
    return with_wrapper(rows)


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the bucket sizes of each wrapper, the one with the shortest median step; rows of `on_gpus`."""
    return rows.loc[rows.groupby(["model", "dtype", "wrapper"])["p50_ms"].idxmin()]


def scaling(rows: pd.DataFrame) -> pd.DataFrame:
    """Efficiency on n GPUs, against one process that talks to nobody.

    Weak scaling: each GPU keeps its sequences, and the step should take as long as one process takes for
    them. Strong: the batch stays and is shared, and the step should take 1/n of what one process takes.

    Args:
        rows: of ddp_times, those of one process (implementation "single") among them.

    Returns:
        A row for each n above 1, wrapper and batch: its fastest bucket size, with `weak_efficiency` and
        `strong_efficiency`; empty where one process has not been measured.
    """
    rows = rows.query("status == 'ok' and backend == 'nccl' and p50_ms.notna()")
    alone = rows[rows["implementation"] == "single"].drop_duplicates([*_WORK, "batch_size"], keep="last")
    alone = alone.set_index([*_WORK, "batch_size"])["p50_ms"]
    many = rows[rows["world_size"] > 1]
    places = many.groupby([*_WORK, "world_size", "batch_size", "implementation"])["p50_ms"]
    best = many.loc[places.idxmin()]

    def one_process_ms(batch_size: pd.Series) -> pd.Series:
        work = pd.MultiIndex.from_frame(best[_WORK].assign(batch_size=batch_size))
        return alone.reindex(work).set_axis(best.index)

    weak = one_process_ms(best["batch_size"] // best["world_size"]) / best["p50_ms"]
    strong = one_process_ms(best["batch_size"]) / (best["world_size"] * best["p50_ms"])
    return with_wrapper(with_model(best.assign(weak_efficiency=weak, strong_efficiency=strong)))


def strong_and_weak(rows: pd.DataFrame, implementation: str) -> pd.DataFrame:
    """Both kinds of `scaling` of one wrapper with xl (2025): a batch of 4 shared, 2 sequences on each GPU.

    Returns:
        A row for each dtype, number of GPUs and kind: `scaling` ("strong" or "weak"), `work` (the same in
        words), GPUs, p50_ms, efficiency and bucket_size_mb.
    """
    found = scaling(rows).query("model == 'xl (2025)' and implementation == @implementation")
    found = found.assign(GPUs=found["world_size"])
    kinds = {
        "strong": (found["batch_size"] == 4, "the same batch of 4"),
        "weak": (found["batch_size"] == 2 * found["world_size"], "2 sequences on each"),
    }
    both = pd.concat(
        found[where].assign(scaling=kind, work=work, efficiency=found[f"{kind}_efficiency"])
        for kind, (where, work) in kinds.items()
    )
    columns = ["dtype", "scaling", "work", "GPUs", "p50_ms", "efficiency", "bucket_size_mb"]
    return both.dropna(subset="efficiency")[columns].reset_index(drop=True)


def stages(timeline: pd.DataFrame) -> pd.DataFrame:
    """What the lanes of a step tell: how long backward took, how much of that the GPU computed, and the tail.

    Args:
        timeline: spans of one model on one rank, of `on_gpus`.

    Returns:
        A row for each dtype, wrapper and bucket size: backward_ms, busy_share (of backward), communication_ms
        and tail_ms, from the end of backward to that of communication.
    """
    rows = []
    place = ["dtype", "wrapper", "bucket_size_mb"]
    for values, lanes in timeline.groupby(place, dropna=False):
        backward = lanes.query("lane == 'compute' and range == 'backward'")
        span = backward["end_ms"].max() - backward["start_ms"].min()
        busy = (backward["end_ms"] - backward["start_ms"]).sum() / span
        found = overlap_values(lanes)
        rows.append((*values, span, busy, found["profiled_communication_ms"], found["profiled_tail_ms"]))
    return pd.DataFrame(rows, columns=[*place, "backward_ms", "busy_share", "communication_ms", "tail_ms"])
