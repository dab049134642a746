"""Ours beside the fastest of its peers, size by size, and why it falls short where it does."""

from collections.abc import Iterable

import pandas as pd

from cs336_systems.report.frames import plain, require_columns

_SIZE = ["dtype", "num_heads", "batch_size", "context_length", "d_head", "pass"]


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


def why_short(line: pd.Series, programs: int, processors: int) -> str:
    """The reason for a size at which ours is slower or has no time, told by the times there are.

    Args:
        line: of `fastest_peer`, with `ours_graph_ms` and `peer_graph_ms` where the two were timed as CUDA
            graphs too.
        programs: that the forward kernel launches; processors: the GPU's streaming multiprocessors.
    """
    if line.get("failure"):
        return f"ours: {line['failure']}"
    ours, theirs = line.get("ours_graph_ms"), line.get("peer_graph_ms")
    if pd.notna(ours) and pd.notna(theirs):
        where = "the kernels themselves are slower" if ours > theirs else "launched from Python"
        return f"{where}: replayed from a graph {1e3 * ours:.1f} µs against {1e3 * theirs:.1f} µs"
    if pd.notna(ours) and ours < line["ours_ms"] / 2:
        return f"launched from Python: replayed from a graph {1e3 * ours:.1f} µs"
    if programs < processors:
        return f"{programs} programs for {processors} multiprocessors"
    return f"slower kernels, with {programs:,} programs for {processors} multiprocessors"
