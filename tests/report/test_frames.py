import pandas as pd
import pytest

from cs336_systems.report.frames import check_drawable, compared, require_one_row_each


def test_every_row_is_divided_by_its_equal(rows):
    stamped = rows.assign(commit=range(6), measured_at=range(6), backend=None)  # neither tells rows apart
    pairs = compared(stamped, "implementation", "plain", "p50_ms", place=("context_length",))
    pairs = pairs.set_index("context_length")
    assert pairs["ratio"].dropna().to_dict() == {256: 2.0, 512: 4.0}
    assert pairs.loc[1024, "baseline_status"] == "oom"


def test_a_rate_is_better_when_it_is_higher(rows):
    rates = rows.assign(bus_bandwidth_gbps=rows["p50_ms"])
    pairs = compared(rates, "implementation", "plain", "bus_bandwidth_gbps")
    assert pairs["ratio"].dropna().tolist() == [0.5, 0.25]


@pytest.mark.parametrize("other", [4, None])
def test_rows_that_differ_in_something_else_are_refused_and_only_that_is_told(rows, other):
    sizes = rows["implementation"].map({"plain": 8, "compiled": other})
    mixed = rows.assign(backend=None, batch_size=sizes)
    with pytest.raises(ValueError, match=r"differ in batch_size \((4.*|nan) against 8[.0]*\)$"):
        compared(mixed, "implementation", "plain", "p50_ms", place=("context_length",))


def test_a_place_without_the_baseline_is_a_gap(rows):
    fewer = rows[(rows["implementation"] == "compiled") | (rows["context_length"] == 256)]
    pairs = compared(fewer, "implementation", "plain", "p50_ms", place=("context_length",))
    assert pairs["context_length"].tolist() == [256]


def test_machines_are_compared_across_everything_that_names_them(places):
    named = places.assign(machine=places["where"].str[:4], gpu=places["where"].str[-4:])
    pairs = compared(named[named["implementation"] == "compiled"], "where", "reference: H200", "p50_ms")
    assert pairs["ratio"].tolist() == [1.0] * 6


def test_a_missing_baseline_names_what_there_is(rows):
    with pytest.raises(ValueError, match=r"sdpa.*plain, compiled"):
        compared(rows, "implementation", "sdpa", "p50_ms")


def test_two_rows_in_one_place_are_refused_with_their_difference(rows):
    both = pd.concat([rows, rows.assign(batch_size=4)])
    with pytest.raises(ValueError, match=r"context_length=256.* batch_size \(8, 4\)"):
        require_one_row_each(both, "context_length", "implementation")
    with pytest.raises(ValueError, match="duplicates"):
        require_one_row_each(pd.concat([rows, rows]), "context_length", "implementation")


def test_a_missing_column_and_a_gap_in_what_places_a_row_are_named(rows):
    with pytest.raises(ValueError, match=r"mean_ms.*implementation, pass"):
        check_drawable(rows, "context_length", "mean_ms", None, None)
    gap = rows.assign(dtype=["float32"] * 5 + [None])
    with pytest.raises(ValueError, match="1 of 6 rows have no dtype"):
        check_drawable(gap, "context_length", "p50_ms", "dtype", None)
