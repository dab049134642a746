import pandas as pd
import pytest

from labbook import compare
from labbook.compare import beside_published, beside_reference, compared, longest_warmup, times_in
from labbook.tables import pivot


def of(machine, *rows):
    """Rows of a machine; by default one."""
    same = {
        "machine": machine,
        "context_length": 128,
        "p50_ms": 1.0,
        "status": "ok",
    }
    return pd.DataFrame([same | row for row in rows or ({},)])


def test_the_reference_stands_beside_what_it_measured_too():
    short = {
        "warmup_steps": 1,
        "p50_ms": 9.0,
        "d_head": None,
    }
    long = {
        "warmup_steps": 5,
        "p50_ms": 2.0,
        "d_head": None,
    }
    mine = of("cpu", {"warmup_steps": 3}, {"warmup_steps": 3, "context_length": 256})
    frame = beside_reference(mine, of("h200", short, long))
    assert times_in(frame) == ["p50_ms", "reference_ms"]
    assert frame["reference_ms"].fillna(0).tolist() == [2.0, 0.0]
    theirs = of("h200", {"context_length": 512})
    for mine in (of("cpu"), of("gpu", {"d_head": 64}), of("nobody")[:0]):
        assert times_in(beside_reference(mine, theirs)) == ["p50_ms"]


def test_each_has_a_status_of_its_own():
    out_of_memory = {
        "d_head": 1,
        "p50_ms": None,
        "status": "oom",
    }
    skipped = {
        "d_head": 3,
        "p50_ms": None,
        "status": "skipped",
    }
    theirs = of("h200", out_of_memory, {"d_head": 2, "p50_ms": 3.0})
    mine = of("cpu", {"d_head": 1, "p50_ms": 4.0}, skipped)
    frame = beside_reference(mine, theirs)
    table = pivot(frame, "d_head", "context_length", times_in(frame))
    assert table.to_numpy().tolist() == [["4.00", "OOM"], ["skipped", "–"]]


def test_of_several_warmups_the_longest_is_shown():
    frame = pd.DataFrame(
        {
            "pass": ["forward", "forward", "backward"],
            "d_head": [16, 16, None],
        }
    )
    frame = frame.assign(warmup_steps=[5, 2, 2])
    frame = frame.assign(p50_ms=[1.0, 2.0, 3.0])
    assert longest_warmup(frame)["p50_ms"].tolist() == [1.0, 3.0]


def test_a_report_stands_beside_what_both_measured():
    ours = of("h200", {"d_head": 1}, {"d_head": 2, "p50_ms": None}, {"d_head": 3})
    theirs = pd.DataFrame({"d_head": [1, 1, 2, 3, 4], "p50_ms": [3.0, 4.0, 5.0, None, 6.0]})
    theirs["gpu"] = list("abcde")
    both = beside_published(theirs, ours, ["d_head"], "p50_ms")
    assert both.to_dict("split", index=False)["data"] == [[1, 3, 1, 3, "a"], [1, 4, 1, 4, "b"]]
    assert list(both) == ["d_head", "theirs", "ours", "ratio", "card"]
    with pytest.raises(ValueError, match="3 rows share context_length=128"):
        beside_published(theirs.assign(context_length=128), ours, ["context_length"], "p50_ms")


def test_every_row_is_divided_by_its_equal(rows):
    def divided(rows):
        return compared(rows, "implementation", "plain", "p50_ms")

    stamped = rows.assign(run=list("abcdef"), backend=None)
    stamped = stamped.assign(gain=rows["p50_ms"] / 3, extra_mib=range(6))
    pairs = divided(stamped).set_index("context_length")
    assert pairs["ratio"].dropna().to_dict() == {256: 2.0, 512: 4.0}
    assert pairs.loc[1024, "baseline_status"] == "oom"
    with pytest.raises(ValueError, match=r"differ in .*who"):
        divided(rows.assign(who=list("abcdef")))
    for other in (4, None):
        sizes = rows["implementation"].map({"plain": 8, "compiled": other})
        with pytest.raises(ValueError, match=r"batch_size \(8.*, (4|nan)"):
            divided(rows.assign(backend=None, batch_size=sizes))


def test_rows_that_are_equal_are_refused_as_duplicates(rows):
    with pytest.raises(ValueError, match=r"context_length=256.* duplicates"):
        compare.require_one_row_each(pd.concat([rows, rows]), "context_length", "implementation")
