import pandas as pd
import pytest

from labbook.frames import compared, require_one_row_each


def test_every_row_is_divided_by_its_equal(rows):
    stamped = rows.assign(commit=range(6), measured_at=range(6), backend=None)  # neither tells rows apart
    pairs = compared(stamped, "implementation", "plain", "p50_ms").set_index("context_length")
    assert pairs["ratio"].dropna().to_dict() == {256: 2.0, 512: 4.0}
    assert pairs.loc[1024, "baseline_status"] == "oom"


@pytest.mark.parametrize("other", [4, None])
def test_rows_that_differ_in_something_else_are_refused(rows, other):
    sizes = rows["implementation"].map({"plain": 8, "compiled": other})
    with pytest.raises(ValueError, match=r"batch_size \(8.*, (4|nan)"):
        compared(rows.assign(backend=None, batch_size=sizes), "implementation", "plain", "p50_ms")


def test_machines_are_compared_across_everything_that_names_them(places):
    named = places.assign(machine=places["where"].str[:4], gpu=places["where"].str[-4:])
    pairs = compared(named[named["implementation"] == "compiled"], "where", "reference: H200", "p50_ms")
    assert pairs["ratio"].tolist() == [1.0] * 6


def test_two_rows_in_one_place_are_refused_with_their_difference(rows):
    both = pd.concat([rows, rows.assign(batch_size=4)])
    with pytest.raises(ValueError, match=r"context_length=256.* batch_size \(8, 4\)"):
        require_one_row_each(both, "context_length", "implementation")
    with pytest.raises(ValueError, match="duplicates"):
        require_one_row_each(pd.concat([rows, rows]), "context_length", "implementation")
