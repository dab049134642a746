import pandas as pd
import pytest

from cs336_systems.report.frames import compared, drawable, plain, require_one_row_each


def test_every_row_is_divided_by_its_equal(rows):
    pairs = compared(rows, "implementation", "eager", "p50_ms", place=("context_length",))
    assert pairs.set_index("context_length")["ratio"].dropna().to_dict() == {256: 2.0, 512: 4.0}
    assert pairs.set_index("context_length").loc[1024, "baseline_status"] == "oom"


def test_a_rate_is_better_when_it_is_higher(rows):
    rates = rows.assign(bus_bandwidth_gbps=rows["p50_ms"])
    pairs = compared(rates, "implementation", "eager", "bus_bandwidth_gbps")
    assert pairs["ratio"].dropna().tolist() == [0.5, 0.25]


def test_rows_that_differ_in_something_else_are_refused(rows):
    mixed = rows.assign(batch_size=rows["implementation"].map({"eager": 8, "compiled": 4}))
    message = (
        r"compiled cannot be compared with implementation=eager: .* differ in batch_size \(4 against 8\)"
    )
    with pytest.raises(ValueError, match=message):
        compared(mixed, "implementation", "eager", "p50_ms", place=("context_length",))


def test_only_what_differs_is_told(rows):
    mixed = rows.assign(backend=None, batch_size=rows["implementation"].map({"eager": 8, "compiled": 4}))
    with pytest.raises(ValueError, match=r"differ in batch_size \(4 against 8\)$"):
        compared(mixed, "implementation", "eager", "p50_ms", place=("context_length",))


def test_an_empty_key_differs_from_a_filled_one(rows):
    mixed = rows.assign(warmup_steps=rows["implementation"].map({"eager": 5}))
    with pytest.raises(ValueError, match=r"warmup_steps"):
        compared(mixed, "implementation", "eager", "p50_ms")


def test_two_empty_keys_are_equal(rows):
    pairs = compared(rows.assign(backend=None), "implementation", "eager", "p50_ms")
    assert len(pairs) == 3


def test_a_place_without_the_baseline_is_a_gap(rows):
    fewer = rows[(rows["implementation"] == "compiled") | (rows["context_length"] == 256)]
    pairs = compared(fewer, "implementation", "eager", "p50_ms", place=("context_length",))
    assert pairs["context_length"].tolist() == [256]


def test_provenance_may_differ(rows):
    stamped = rows.assign(commit=range(len(rows)), measured_at=range(len(rows)))
    assert len(compared(stamped, "implementation", "eager", "p50_ms")) == 3


def test_machines_are_compared_across_everything_that_names_them(places):
    named = places.assign(machine=places["where"].str[:4], gpu=places["where"].str[-4:])
    one = named[named["implementation"] == "compiled"]
    pairs = compared(one, "where", "reference: H200", "p50_ms")
    assert pairs["ratio"].tolist() == [1.0] * 6


def test_a_missing_baseline_names_what_there_is(rows):
    with pytest.raises(ValueError, match="no row has implementation=sdpa; there are: eager, compiled"):
        compared(rows, "implementation", "sdpa", "p50_ms")


def test_two_rows_in_one_place_are_refused_with_their_difference(rows):
    both = pd.concat([rows, rows.assign(batch_size=4)])
    with pytest.raises(
        ValueError, match=r"2 rows share .*context_length=256.* differ in batch_size \(8, 4\)"
    ):
        require_one_row_each(both, "context_length", "implementation")


def test_duplicates_are_refused(rows):
    with pytest.raises(ValueError, match="duplicates"):
        drawable(pd.concat([rows, rows]), "context_length", "p50_ms", "implementation", None)


def test_a_missing_column_names_those_there_are(rows):
    with pytest.raises(ValueError, match="no column mean_ms; they have: implementation, pass"):
        drawable(rows, "context_length", "mean_ms", None, None)


def test_nullable_columns_become_plain_numbers():
    frame = pd.DataFrame(
        {
            "full": pd.array([1, 2], "Int64"),
            "gap": pd.array([1, None], "Int64"),
            "flag": pd.array([True, None], "boolean"),
        }
    )
    dtypes = plain(frame).dtypes.astype(str).to_dict()
    assert (dtypes["full"], dtypes["gap"]) == ("int64", "float64")
    assert plain(frame)["flag"].isna().tolist() == [False, True]


def test_a_gap_in_what_places_a_row_is_refused(rows):
    gap = rows.assign(dtype=["float32"] * 5 + [None])
    with pytest.raises(ValueError, match="1 of 6 rows have no dtype"):
        drawable(gap, "context_length", "p50_ms", "dtype", None)
