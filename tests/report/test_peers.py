"""Ours beside its fastest peer, and the reasons for falling short."""

import pandas as pd
import pytest

from cs336_systems.report.peers import fastest_peer, why_short


def row(name, length, ms, pass_="forward"):
    size = {"dtype": "float32", "num_heads": 1, "batch_size": 1, "context_length": length, "d_head": 64}
    status = {"status": "ok", "reason": ""} if ms else {"status": "oom", "reason": "out of memory"}
    return {"implementation": name, "pass": pass_, "p50_ms": ms, **size, **status}


def test_the_fastest_is_chosen_at_every_size():
    rows = [row("ours", 32, 2.0), row("a", 32, 3.0), row("b", 32, 1.0)]
    rows += [row("ours", 64, 2.0), row("a", 64, 3.0), row("b", 64, 4.0), row("a", 128, 1.0)]
    lines = fastest_peer(pd.DataFrame(rows), "ours", ["a", "b"])
    assert lines[["context_length", "peer", "ratio"]].to_numpy().tolist() == [[32, "b", 0.5], [64, "a", 1.5]]


def test_what_has_no_time_is_no_peer():
    rows = [row("ours", 32, 2.0), row("a", 32, None), row("b", 32, 3.0), row("ours", 64, 2.0)]
    rows += [row("a", 64, None), row("ours", 128, 2.0)]
    lines = fastest_peer(pd.DataFrame(rows), "ours", ["a", "b"])
    assert lines["context_length"].tolist() == [32, 64]  # nobody else was tried at 128
    assert lines["peer"].fillna("nobody").tolist() == ["b", "nobody"]
    assert lines["ratio"].isna().tolist() == [False, True]


def test_a_failure_of_ours_is_a_line_too():
    lines = fastest_peer(pd.DataFrame([row("ours", 32, None), row("a", 32, 3.0)]), "ours", ["a"])
    assert lines["failure"].tolist() == ["oom, out of memory"]
    assert lines["ratio"].isna().all()


@pytest.mark.parametrize(
    ("line", "programs", "reason"),
    [
        (
            {"ours_graph_ms": 0.01, "peer_graph_ms": 0.02},
            2,
            "launched from Python: replayed from a graph 10.0 µs",
        ),
        ({"ours_graph_ms": 0.02, "peer_graph_ms": 0.01}, 2, "the kernels themselves are slower"),
        ({"ours_ms": 0.1, "ours_graph_ms": 0.01}, 2, "launched from Python: replayed from a graph 10.0 µs"),
        ({"ours_ms": 0.1, "ours_graph_ms": 0.09}, 64, "64 programs"),
        ({"ours_graph_ms": None, "peer_graph_ms": None}, 64, "64 programs for 132 multiprocessors"),
        ({}, 1024, "slower kernels, with 1,024 programs"),
        ({"failure": "oom, out of memory"}, 2, "ours: oom, out of memory"),
    ],
)
def test_reasons(line, programs, reason):
    assert reason in why_short(pd.Series(line, dtype=object), programs, 132)
