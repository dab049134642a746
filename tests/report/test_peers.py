"""Ours beside its fastest peer, and the reasons for falling short."""

import pandas as pd
import pytest

from cs336_systems.report.peers import fastest_peer, why_short


def row(name, length, ms, pass_="forward"):
    size = {"dtype": "float32", "num_heads": 1, "batch_size": 1, "context_length": length, "d_head": 64}
    return {"implementation": name, "pass": pass_, "p50_ms": ms, **size}


def test_the_fastest_is_chosen_at_every_size():
    rows = [row("ours", 32, 2.0), row("a", 32, 3.0), row("b", 32, 1.0)]
    rows += [row("ours", 64, 2.0), row("a", 64, 3.0), row("b", 64, 4.0), row("a", 128, 1.0)]
    lines = fastest_peer(pd.DataFrame(rows), "ours", ["a", "b"])
    assert lines[["context_length", "peer", "ratio"]].to_numpy().tolist() == [[32, "b", 0.5], [64, "a", 1.5]]


def test_what_has_no_time_is_no_peer():
    lines = fastest_peer(pd.DataFrame([row("ours", 32, 2.0), row("a", 32, None)]), "ours", ["a"])
    assert lines.empty


@pytest.mark.parametrize(
    ("line", "programs", "reason"),
    [
        (
            {"ours_graph_ms": 0.01, "peer_graph_ms": 0.02},
            2,
            "launched from Python: replayed from a graph 10.0 µs",
        ),
        ({"ours_graph_ms": 0.02, "peer_graph_ms": 0.01}, 2, "the kernels themselves are slower"),
        ({"ours_graph_ms": None, "peer_graph_ms": None}, 64, "64 programs for 132 multiprocessors"),
        ({}, 1024, "slower kernels"),
    ],
)
def test_reasons(line, programs, reason):
    assert reason in why_short(pd.Series(line, dtype=object), programs, 132)
