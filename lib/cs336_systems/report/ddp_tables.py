"""Rows of collectives and of data-parallel training, chosen and related: fits, bucket sizes, efficiency."""

from typing import Any

import pandas as pd

from cs336_systems.accounting.collective_costs import fit_collective  # noqa: F401
from cs336_systems.configs import model_size
from cs336_systems.measure.overlap import overlap_values
from labbook.labels import value_label


def with_model(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `model`: size and edition in one label, for "xl" is another model in each."""
    keys = zip(frame["model_size"], frame["edition"], strict=True)
    return frame.assign(model=[model_size(*key).label for key in keys])


def with_wrapper(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of data-parallel training with a column `wrapper`: by its label."""
    return frame.assign(wrapper=frame["implementation"].map(value_label))


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


def strong_and_weak(rows: pd.DataFrame, implementation: str) -> pd.DataFrame:
    """How one wrapper scales with xl (2025) on n GPUs, against one process that talks to nobody.

    Weak scaling: each GPU keeps two sequences, and the step should take as long as one process takes for
    them. Strong: a batch of 4 is shared, and the step should take 1/n of what one process takes for it.

    Args:
        rows: of ddp_times, those of one process (implementation "single") among them.

    Returns:
        A row for each dtype, number of GPUs and kind, of its fastest bucket size: `scaling` ("strong" or
        "weak"), `work` (the same in words), GPUs, p50_ms, efficiency and bucket_size_mb; none where one
        process has not been measured.
    """
    rows = with_model(rows.query("status == 'ok' and backend == 'nccl' and attention == 'plain'"))
    rows = rows.query("model == 'xl (2025)' and p50_ms.notna()").assign(GPUs=rows["world_size"])
    alone = rows[rows["implementation"] == "single"].rename(columns={"p50_ms": "alone_ms"})
    work = ["dtype", "context_length"]
    alone = alone.drop_duplicates([*work, "batch_size"], keep="last")[[*work, "batch_size", "alone_ms"]]
    many = rows[(rows["GPUs"] > 1) & (rows["implementation"] == implementation)]
    best = many.loc[many.groupby([*work, "GPUs", "batch_size"])["p50_ms"].idxmin()]
    weak, strong = best[best["batch_size"] == 2 * best["GPUs"]], best[best["batch_size"] == 4]
    weak = weak.merge(alone.query("batch_size == 2").drop(columns="batch_size"), on=work)
    strong = strong.merge(alone, on=[*work, "batch_size"])
    kinds = [
        strong.assign(scaling="strong", work="the same batch of 4", shared=strong["GPUs"]),
        weak.assign(scaling="weak", work="2 sequences on each", shared=1),
    ]
    both = pd.concat(kinds, ignore_index=True)
    columns = ["dtype", "scaling", "work", "GPUs", "p50_ms", "efficiency", "bucket_size_mb"]
    return both.assign(efficiency=both["alone_ms"] / both["shared"] / both["p50_ms"])[columns]


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
