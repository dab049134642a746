import pandas as pd
import pytest

from labbook import compare
from labbook.compare import beside_reference, compared, longest_warmup, published_rows, times_in
from labbook.tables import pivot


def of(machine, *rows):
    same = {"machine": machine, "context_length": 128, "p50_ms": 1.0, "status": "ok"}
    return pd.DataFrame([same | row for row in rows or ({},)])


def test_rows_say_where_they_come_from_and_the_reference_appears_once(monkeypatch):
    theirs = of("h200", {}, {"context_length": 256})
    load_rows = {"h200": theirs, "cpu": of("cpu")}.get
    monkeypatch.setattr(compare, "load_rows", lambda slug, machine, table: load_rows(machine))
    for machine, expected in (
        ("cpu", ["reference: H200", "this machine: cpu"]),
        ("h200", ["reference: H200"] * 2),
    ):
        frame = compare.side_by_side(
            "slug", machine, table="model_times", sharing=["context_length"]
        )
        assert frame["where"].tolist() == expected


def test_the_reference_stands_beside_what_it_measured_too():
    warm_ups = [{"warmup_steps": n, "p50_ms": ms, "d_head": None} for n, ms in ((1, 9.0), (5, 2.0))]
    mine = of("cpu", *({"warmup_steps": 3, "context_length": length} for length in (128, 256)))
    frame = beside_reference(mine, of("h200", *warm_ups))
    assert times_in(frame) == ["p50_ms", "reference_ms"]
    assert frame["reference_ms"].fillna(0).tolist() == [2.0, 0.0]
    for mine in (of("cpu"), of("gpu", {"d_head": 64}), of("nobody")[:0]):
        assert times_in(beside_reference(mine, of("h200", {"context_length": 512}))) == ["p50_ms"]


def test_each_has_a_status_of_its_own():
    theirs = of(
        "h200", {"d_head": 1, "p50_ms": None, "status": "oom"}, {"d_head": 2, "p50_ms": 3.0}
    )
    mine = of(
        "cpu", {"d_head": 1, "p50_ms": 4.0}, {"d_head": 3, "p50_ms": None, "status": "skipped"}
    )
    frame = beside_reference(mine, theirs)
    table = pivot(frame, "d_head", "context_length", times_in(frame))
    assert table.to_numpy().tolist() == [["4.00", "OOM"], ["skipped", "–"]]


def test_of_several_warmups_the_longest_is_shown():
    frame = pd.DataFrame({"pass": ["forward", "forward", "backward"], "d_head": [16, 16, None]})
    frame = frame.assign(warmup_steps=[5, 2, 2], p50_ms=[1.0, 2.0, 3.0])
    assert longest_warmup(frame)["p50_ms"].tolist() == [1.0, 3.0]
    assert (
        len(longest_warmup(pd.concat([frame.assign(machine=name) for name in ("h200", "cpu")])))
        == 4
    )


def test_published_rows_tell_where_they_are_from():
    assert set(published_rows("benchmarking_script")["where"]) == {
        "published: RTX 5090, rtx5090-report"
    }


def test_every_row_is_divided_by_its_equal(rows):
    stamped = rows.assign(
        run=list("abcdef"), backend=None, gain=rows["p50_ms"] / 3, extra_mib=range(6)
    )
    pairs = compared(stamped, "implementation", "plain", "p50_ms").set_index("context_length")
    assert pairs["ratio"].dropna().to_dict() == {256: 2.0, 512: 4.0}
    assert pairs.loc[1024, "baseline_status"] == "oom"
    with pytest.raises(ValueError, match=r"differ in .*who"):
        compared(rows.assign(who=list("abcdef")), "implementation", "plain", "p50_ms")
    for other in (4, None):
        sizes = rows["implementation"].map({"plain": 8, "compiled": other})
        with pytest.raises(ValueError, match=r"batch_size \(8.*, (4|nan)"):
            compared(
                rows.assign(backend=None, batch_size=sizes), "implementation", "plain", "p50_ms"
            )


def test_machines_are_compared_across_everything_that_names_them(places):
    named = places.assign(machine=places["where"].str[:4], gpu=places["where"].str[-4:])
    pairs = compared(
        named[named["implementation"] == "compiled"], "where", "reference: H200", "p50_ms"
    )
    assert pairs["ratio"].tolist() == [1.0] * 6


def test_rows_that_are_equal_are_refused_as_duplicates(rows):
    with pytest.raises(ValueError, match=r"context_length=256.* duplicates"):
        compare.require_one_row_each(pd.concat([rows, rows]), "context_length", "implementation")
