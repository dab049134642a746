"""Ours beside its fastest baseline, the reasons for falling short, and what techniques gained."""

import pandas as pd
import pytest

from cs336_systems.report import HOST, KERNELS, fallen_short, fastest_baseline, grouped, host_bound


def row(name, length, ms, pass_="forward"):
    size = {"dtype": "float32", "num_heads": 1, "batch_size": 1, "context_length": length, "d_head": 64}
    status = {"status": "ok", "reason": ""} if ms else {"status": "oom", "reason": "out of memory"}
    return {"implementation": name, "pass": pass_, "p50_ms": ms, **size, **status}


def passes(name, length, *times):
    return [row(name, length, *pair) for pair in zip(times, ("forward", "backward", "forward_backward"))]  # noqa: B905


def beside(rows, *baselines):
    frame = pd.DataFrame(rows)
    return fastest_baseline(frame.assign(host_bound=host_bound(frame)), "ours", baselines)


def test_the_fastest_with_a_time_is_chosen_at_every_size():
    rows = [row("ours", 32, 2.0), row("a", 32, 3.0), row("b", 32, 1.0)]
    rows += [row("ours", 64, 2.0), row("a", 64, None), row("b", 64, 4.0)]
    rows += [row("ours", 128, 2.0), row("a", 128, None), row("ours", 256, 2.0), row("a", 512, 1.0)]
    lines = beside(rows, "a", "b").fillna({"baseline": "nobody", "ratio": 0})
    found = lines[["context_length", "baseline", "ratio"]].to_numpy().tolist()
    assert found == [[32, "b", 0.5], [64, "b", 2.0], [128, "nobody", 0]]


def test_passes_that_do_not_add_up_are_the_hosts_time_and_so_is_all_that_is_shorter():
    rows = passes("ours", 32, 1, 1, 2) + passes("ours", 64, 1, 1, 3) + passes("ours", 128, 1, 2, 2.9)
    rows += [*passes("a", 32, 1, 1, 2), row("a", 64, 1.0)]  # by itself a pass says nothing
    frame = pd.DataFrame(rows)
    told = frame.assign(bound=host_bound(frame)).groupby(["implementation", "context_length"])["bound"].all()
    assert told.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("ours", "baselines", "told"),
    [
        ((1, 1, 4), [(1, 1, 2)], False),  # behind, with a time of the host's
        ((1, 1, 4), [(3, 3, 6), (1, 1, 5)], False),  # ahead, of another host
        ((1, 1, 4), [(3, 3, 6)], True),  # ahead: its kernels take even less
        ((1, 1, 2), [(1, 1, 1.5)], True),  # behind: the other's kernels take even less
    ],
)
def test_times_tell_whose_kernels_are_faster_where_the_slower_is_the_gpus(ours, baselines, told):
    rows = passes("ours", 32, *ours)
    for name, times in zip("ab", baselines, strict=False):
        rows += passes(name, 32, *times)
    lines = beside(rows, "a", "b").set_index("pass")
    assert lines.loc["forward_backward", "host_bound"] == (not told)


def test_every_cell_that_falls_short_has_a_reason():
    rows = passes("ours", 16, 0.01, 0.01, 0.1) + passes("a", 16, 0.01, 0.01, 0.09)
    for power, (ours, theirs) in enumerate([(1.0, 0.8), (4.0, 2.0), (None, 9.0), (4.0, 8.0)]):
        rows += [row("ours", 32 * 2**power, ours, "forward_backward")]
        rows += [row("a", 32 * 2**power, theirs, "forward_backward")]
    short = fallen_short(beside(rows, "a").query("`pass` == 'forward_backward'"))
    assert short["reason"].tolist() == [HOST, KERNELS, KERNELS, "ours: oom, out of memory"]
    table = grouped(short).set_index("reason")
    assert table["cells"].sum() == len(short)
    assert table.loc[KERNELS, ["context_lengths", "ratio"]].tolist() == ["32, 64", "0.500 to 0.800"]
    assert grouped(fallen_short(beside([row("ours", 32, 1.0), row("a", 32, 2.0)], "a"))).empty
