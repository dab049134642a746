"""Ours beside the fastest of its peers, size by size, and why it falls short where it does."""

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from cs336_systems.report.frames import plain, require_columns
from cs336_systems.report.words import significant

_SIZE = ["dtype", "num_heads", "batch_size", "context_length", "d_head", "pass"]
_BOTH = "forward_backward"

# Why a cell falls short. SLOW: also where there are programs for every processor.
HOST, FEW, SLOW = "launched from Python", "too few programs", "slower kernels"


def fastest_peer(rows: pd.DataFrame, ours: str, peers: Iterable[str], times: str = "p50_ms") -> pd.DataFrame:
    """A line for every size and pass that ours and one peer at least have a row of, timed or failed.

    Args:
        rows: timed in one way (one value of `case`).
        peers: implementations to choose the fastest from, at every size anew.

    Returns:
        The size, `ours_ms`, `failure` (why ours has no time, else empty), `peer`, `peer_ms` (none where no
        peer has a time), and `ratio`: how many times as fast as the peer ours is.

    Raises:
        ValueError: a column is missing.
    """
    require_columns(rows, "implementation", *_SIZE, times, "status", "reason")
    rows = plain(rows)
    mine = rows[rows["implementation"] == ours].set_index(_SIZE)
    said = mine["status"] + ", " + mine["reason"].fillna("")
    mine = mine.assign(ours_ms=mine[times], failure=said.where(mine[times].isna(), ""))
    others = rows[rows["implementation"].isin(tuple(peers))].sort_values(times)
    best = others.drop_duplicates(_SIZE).set_index(_SIZE)[["implementation", times]]
    best = best.rename(columns={"implementation": "peer", times: "peer_ms"})
    best["peer"] = best["peer"].where(best["peer_ms"].notna())
    both = pd.concat([mine[["ours_ms", "failure"]], best], axis=1, join="inner").reset_index()
    both = both.assign(ratio=both["peer_ms"] / both["ours_ms"])
    return both.sort_values(_SIZE).reset_index(drop=True)


def fallen_short(
    lines: pd.DataFrame, graphs: pd.DataFrame, ours: str, programs: Callable[[Any], int], processors: int
) -> pd.DataFrame:
    """The lines at which ours is slower or has no time, each with its `reason`.

    What a CUDA graph replays faster than the peer, or in a fraction of the time, is lost in launching. Else
    it is the kernels: SLOW where ours is slower at the longest sequence too, FEW where a sequence makes
    fewer programs than there are processors.

    Args:
        lines: of `fastest_peer`, all lengths of a size together.
        graphs: rows of the same sizes, replayed from CUDA graphs, forward and backward together.
        ours: the implementation that the lines are about.
        programs: that a line's forward kernel launches.
        processors: the GPU's streaming multiprocessors.
    """
    place = _SIZE[:-1]
    graphs = graphs[graphs["pass"] == _BOTH]
    replayed = graphs.set_index(["implementation", *place])["p50_ms"].dropna().to_dict()
    series = lines.sort_values("context_length").groupby(["dtype", "d_head", "pass"])
    first, last = series["ours_ms"].transform("first"), series["ratio"].transform("last")
    lines = lines.assign(first_ms=first, last_ratio=last)
    short = lines[(lines["ratio"] < 1) | (lines["failure"] != "")]
    reasons = []
    for line in short.to_dict("records"):
        size = tuple(line[name] for name in place)
        times = replayed.get((ours, *size)), replayed.get((line["peer"], *size))
        reasons.append(why_short(line, times, programs(line) < processors))
    return short.assign(reason=reasons)


def why_short(line: Any, replayed_ms: tuple[float | None, float | None], few: bool) -> str:
    """The reason for one line of `fallen_short`.

    Args:
        line: with `first_ms`, what ours takes for the shortest sequence, and `last_ratio`, at the longest.
        replayed_ms: forward and backward of ours and of the peer from a CUDA graph; None where not timed so.
        few: whether there are fewer programs than processors.
    """
    if line["failure"]:
        return f"ours: {line['failure']}"
    ours, theirs = replayed_ms
    both = line["pass"] == _BOTH
    if ours is None:  # as long as a sequence that takes no time at all
        host = line["pass"] != "forward" and line["ours_ms"] < 1.25 * line["first_ms"]
    elif both and theirs is not None:
        host = ours < theirs
    else:
        host = ours < line["ours_ms"] / (2 if both else 1.25)
    if host:
        return HOST
    if line["last_ratio"] < 1:
        return f"{SLOW}, {FEW}" if few else SLOW
    return FEW if few else SLOW


def grouped(short: pd.DataFrame) -> pd.DataFrame:
    """`fallen_short` by reason, dtype, pass and head size: the lengths, the peers, the ratios, the count."""

    def lengths(values: pd.Series) -> str:
        return ", ".join(map("{:,}".format, sorted(values)))

    def names(values: pd.Series) -> str:
        return " / ".join(values.dropna().unique())

    def span(ratios: pd.Series) -> str:
        low, high = significant(ratios.min()), significant(ratios.max())
        return "–" if ratios.isna().all() else low if low == high else f"{low} to {high}"

    groups = short.groupby(["reason", "dtype", "pass", "d_head"], sort=False)
    table = groups.agg(
        context_lengths=("context_length", lengths), peers=("peer", names), ratio=("ratio", span),
        cells=("ratio", "size"),
    )  # fmt: skip
    return table.reset_index().sort_values(["reason", "dtype", "d_head"], kind="stable", ignore_index=True)
