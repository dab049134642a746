"""Rows of data-parallel training, chosen and related: best bucket sizes, and efficiency on several GPUs."""

from typing import Any

import pandas as pd

from cs336_systems.measure.overlap import overlap
from cs336_systems.report.compare import with_model, with_wrapper
from cs336_systems.report.frames import require_columns

# What must be equal for two rows to be the same work.
_WORK = ("edition", "model_size", "context_length", "dtype", "attention")


def on_gpus(
    rows: pd.DataFrame, world_size: int = 2, batch_size: int = 4, context_length: int = 512
) -> pd.DataFrame:
    """Measured rows over NCCL at one setting, the handout's by default, with `model` and `wrapper`.

    Of models with reference attention, as the handout has them.
    """
    setting = {"world_size": world_size, "batch_size": batch_size, "context_length": context_length}
    for name, value in {**setting, "backend": "nccl", "status": "ok", "attention": "reference"}.items():
        rows = rows[rows[name] == value]
    return with_wrapper(with_model(rows))


def of_run(rows: pd.DataFrame, **chosen: Any) -> pd.DataFrame:
    """The rows of one run of a notebook, with `wrapper`: each column has a value that was asked for.

    An empty cell passes: wrappers without buckets have no bucket size.
    """
    for name, values in chosen.items():
        allowed = values if isinstance(values, list) else [values]
        rows = rows[rows[name].isna() | rows[name].isin(allowed)]
    return with_wrapper(rows)


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the bucket sizes of each wrapper, the one with the shortest median step.

    Args:
        rows: of `on_gpus`.
    """
    return rows.loc[rows.groupby(["model", "dtype", "wrapper"])["p50_ms"].idxmin()]


def scaling(rows: pd.DataFrame) -> pd.DataFrame:
    """Efficiency on n GPUs, against one process that talks to nobody.

    Weak scaling: each GPU keeps its sequences, and the step should take as long as one process takes for
    them. Strong: the batch stays and is shared, and the step should take 1/n of what one process takes.

    Args:
        rows: of the ladder, those of one process (implementation "single") among them.

    Returns:
        A row for each n above 1, wrapper and batch: its fastest bucket size, with `weak_efficiency` and
        `strong_efficiency`; empty where one process has not been measured.
    """
    require_columns(rows, *_WORK, "implementation", "world_size", "batch_size", "p50_ms", "status")
    rows = rows[(rows["status"] == "ok") & rows["p50_ms"].notna()]
    on_gpu = rows[(rows["backend"] == "nccl") & (rows["world_size"] > 1)]
    alone = rows[(rows["implementation"] == "single") & (rows["backend"] == "nccl")]
    alone_ms = alone.set_index([*_WORK, "batch_size"])["p50_ms"].to_dict()
    place = [*_WORK, "world_size", "batch_size", "implementation"]
    best = on_gpu.loc[on_gpu.groupby(place)["p50_ms"].idxmin()] if len(on_gpu) else on_gpu
    weak, strong = [], []
    for row in best.to_dict("records"):
        same, shared = (
            _alone(alone_ms, row, batch)
            for batch in (row["batch_size"] // row["world_size"], row["batch_size"])
        )
        weak.append(same / row["p50_ms"])
        strong.append(shared / (row["world_size"] * row["p50_ms"]))
    return with_wrapper(with_model(best.assign(weak_efficiency=weak, strong_efficiency=strong)))


def strong_and_weak(
    rows: pd.DataFrame, implementation: str, *, model: str = "xl (2025)", batch_size: int = 4, share: int = 2
) -> pd.DataFrame:
    """Both kinds of `scaling` of one wrapper, one under the other.

    Args:
        batch_size: the batch of which strong scaling gives each GPU its part.
        share: the sequences that each GPU keeps in weak scaling.

    Returns:
        A row for each dtype, number of GPUs and kind: `scaling` ("strong" or "weak"), `work` (the same in
        words), GPUs, p50_ms and efficiency.
    """
    found = scaling(rows)
    found = found[(found["model"] == model) & (found["implementation"] == implementation)]
    kinds = {
        "strong": (found["batch_size"] == batch_size, f"the same batch of {batch_size}"),
        "weak": (found["batch_size"] == share * found["world_size"], f"{share} sequences on each"),
    }
    parts = [
        found[here].assign(scaling=kind, work=work, efficiency=found[f"{kind}_efficiency"])
        for kind, (here, work) in kinds.items()
    ]
    both = pd.concat(parts).dropna(subset="efficiency")
    return both.assign(GPUs=both["world_size"])[
        ["dtype", "scaling", "work", "GPUs", "p50_ms", "efficiency", "bucket_size_mb"]
    ].reset_index(drop=True)


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
        backward = lanes[(lanes["lane"] == "compute") & (lanes["range"] == "backward")]
        span = backward["end_ms"].max() - backward["start_ms"].min()
        found = overlap(lanes)
        rows.append(
            dict(zip(place, values, strict=True))
            | {
                "backward_ms": span,
                "busy_share": (backward["end_ms"] - backward["start_ms"]).sum() / span,
                "communication_ms": found["profiled_communication_ms"],
                "tail_ms": found["profiled_tail_ms"],
            }
        )
    names = [*place, "backward_ms", "busy_share", "communication_ms", "tail_ms"]
    return pd.DataFrame(rows, columns=names)


def _alone(alone_ms: dict[tuple, float], row: dict[str, Any], batch_size: int) -> float:
    return alone_ms.get((*(row[name] for name in _WORK), batch_size), float("nan"))
