"""Ours beside its fastest peer, and the reasons for falling short."""

import pandas as pd
import pytest

from cs336_systems.report.baseline_tables import (
    FEW,
    HOST,
    SLOW,
    fallen_short,
    fastest_peer,
    grouped,
    why_short,
)


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
    ("line", "replayed", "few", "reason"),
    [
        ({}, (0.01, 0.02), True, HOST),
        ({}, (0.02, 0.01), True, FEW),
        ({}, (0.02, 0.01), False, SLOW),
        ({}, (0.3, None), True, HOST),
        ({}, (0.9, None), True, FEW),
        ({"pass": "backward"}, (0.7, None), True, HOST),
        ({"pass": "backward"}, (0.9, 0.5), True, FEW),
        ({"first_ms": 0.9}, (None, None), True, HOST),
        ({"first_ms": 0.9, "pass": "forward"}, (None, None), True, FEW),
        ({"last_ratio": 0.5}, (None, None), False, SLOW),
        ({"last_ratio": 0.5}, (None, None), True, f"{SLOW}, {FEW}"),
        ({"failure": "oom, out of memory"}, (None, None), True, "ours: oom, out of memory"),
    ],
)
def test_reasons(line, replayed, few, reason):
    usual = {"pass": "forward_backward", "failure": "", "ours_ms": 1.0, "first_ms": 0.1, "last_ratio": 2.0}
    assert why_short(usual | line, replayed, few) == reason


def test_every_cell_that_falls_short_is_in_a_group():
    whole = "forward_backward"
    ours, theirs = (1.0, 1.1, 4.0, 4.0, None), (0.5, 0.7, 2.0, 8.0, 9.0)
    times = {"ours": ours, "a": theirs}
    rows = [row(name, 32 * 2**i, ms, whole) for name in times for i, ms in enumerate(times[name])]
    lines = fastest_peer(pd.DataFrame(rows), "ours", ["a"])
    graphs = pd.DataFrame([row("ours", 32, 0.1, whole), row("a", 32, 0.2, whole)])
    short = fallen_short(lines, graphs, "ours", lambda line: line["context_length"] // 8, 132)
    assert short["reason"].tolist() == [HOST, HOST, FEW, "ours: oom, out of memory"]
    table = grouped(short).set_index("reason")
    assert table.loc[HOST, ["context_lengths", "ratio", "cells"]].tolist() == ["32, 64", "0.500 to 0.636", 2]
    assert table["cells"].sum() == len(short)
    assert table.loc["ours: oom, out of memory", "ratio"] == "–"


def test_nothing_falls_short():
    lines = fastest_peer(pd.DataFrame([row("ours", 32, 1.0), row("a", 32, 2.0)]), "ours", ["a"])
    short = fallen_short(lines, pd.DataFrame([row("ours", 32, 1.0)]), "ours", lambda line: 1, 132)
    assert grouped(short).empty
