"""Ours beside the fastest of its baselines, and why it falls short."""

from collections.abc import Iterable

import pandas as pd

from labbook.answers import between
from labbook.labels import significant

_SERIES = ["dtype", "num_heads", "batch_size", "d_head"]
_SIZE = [*_SERIES, "context_length", "pass"]

HOST, KERNELS = "host-bound", "slower kernels"  # why a cell falls short


def host_bound(rows: pd.DataFrame) -> pd.Series:
    """Whether the host set the time of each row, and not the GPU.

    The clearing of the cache before a repetition hides some of the work of launching what follows: once where
    forward and backward are timed together, twice where each is timed by itself. So where the host is what is
    timed the two do not add up. A longer sequence is more work for the GPU alone: what is shorter than one
    that does not add up is host-bound too, whatever its own sum.

    Args:
        rows: timed in one way (one `protocol`); without all three passes nothing is known, and said.
    """
    place = ["implementation", *_SERIES, "context_length"]
    passes = rows.pivot_table("p50_ms", place, "pass").reindex(
        columns=["forward", "backward", "forward_backward"]
    )
    off = (passes["forward"] + passes["backward"]) / passes["forward_backward"] - 1
    flags = (off.abs() > 0.1)[::-1].groupby(level=place[:-1]).cummax().to_dict()
    places = rows[place].itertuples(index=False, name=None)
    return pd.Series([flags.get(place, False) for place in places], rows.index, dtype=bool)


def fastest_baseline(rows: pd.DataFrame, ours: str, baselines: Iterable[str]) -> pd.DataFrame:
    """A line for every size and pass that ours and one baseline at least have a row of, timed or failed.

    Args:
        rows: timed in one way (one value of `protocol`), with `host_bound` as a column.
        baselines: implementations to choose the fastest from, at every size anew.

    Returns:
        The size, `ours_ms`, `failure` (why ours has no time, else empty), `baseline`, `baseline_ms` (none
        where no baseline has a time), `ratio`: how many times as fast as the baseline ours is, and
        `host_bound`: the times do not say whose kernels are faster. A call takes at least as long as its
        kernels, so they do where ours is behind and its own time is the GPU's, or ahead and every baseline's
        is.
    """
    mine = rows[rows["implementation"] == ours].set_index(_SIZE)
    said = mine["status"] + ", " + mine["reason"].fillna("")
    mine = mine.assign(ours_ms=mine["p50_ms"], failure=said.where(mine["p50_ms"].isna(), ""))
    others = rows[rows["implementation"].isin(tuple(baselines))].sort_values("p50_ms")
    best = others.drop_duplicates(_SIZE).set_index(_SIZE)
    best = best.rename(columns={"implementation": "baseline", "p50_ms": "baseline_ms"})
    best["baseline"] = best["baseline"].where(best["baseline_ms"].notna())
    best["any_bound"] = others.groupby(_SIZE)["host_bound"].any()
    both = mine[["ours_ms", "failure", "host_bound"]].join(
        best[["baseline", "baseline_ms", "any_bound"]], how="inner"
    )
    both["ratio"] = both["baseline_ms"] / both["ours_ms"]
    both["host_bound"] = both["host_bound"].where(both["ratio"] < 1, both.pop("any_bound"))
    return both.reset_index().sort_values(_SIZE, ignore_index=True)


def fallen_short(lines: pd.DataFrame) -> pd.DataFrame:
    """The lines at which ours is slower or has no time, each with its `reason`: HOST, KERNELS or its failure.

    Args:
        lines: of `fastest_baseline`.
    """
    short = lines[(lines["ratio"] < 1) | (lines["failure"] != "")]
    reason = short["host_bound"].map({True: HOST, False: KERNELS}).astype(object)
    return short.assign(reason=reason.where(short["failure"] == "", "ours: " + short["failure"]))


def grouped(short: pd.DataFrame) -> pd.DataFrame:
    """`fallen_short` by reason, dtype, pass and head size: lengths, baselines, ratios, count."""
    table = short.groupby(["reason", "dtype", "pass", "d_head"], sort=False).agg(
        context_lengths=("context_length", lambda lengths: ", ".join(f"{n:,}" for n in sorted(lengths))),
        baselines=("baseline", lambda names: " / ".join(names.dropna().unique())),
        ratio=("ratio", lambda ratios: between([ratios.min(), ratios.max()], significant)),
        cells=("ratio", "size"),
    )
    return table.reset_index().sort_values(["reason", "dtype", "d_head"], kind="stable", ignore_index=True)
