import warnings

import pandas as pd
import pytest

from labbook.compare import beside_published


def test_a_report_stands_beside_what_both_measured():
    rows = [(1, 2.0), (2, None), (3, 1.0)]
    ours = pd.DataFrame(rows, columns=["d_head", "p50_ms"])
    ours["status"] = "ok"
    rows = [
        (1, 3.0, "a"),
        (1, 4.0, "b"),
        (2, 5.0, "c"),
        (3, None, "d"),
        (4.5, 6.0, "e"),  # a fraction where ours are whole
    ]
    theirs = pd.DataFrame(rows, columns=["d_head", "p50_ms", "gpu"])
    with warnings.catch_warnings(action="error"):
        both = beside_published(theirs, ours, ["d_head"], "p50_ms")
    first, second = both.to_numpy().tolist()
    assert first == [1, 3, 2, 1.5, "a"]
    assert second == [1, 4, 2, 2, "b"]
    with pytest.raises(ValueError, match="2 rows share d_head=1"):
        beside_published(theirs, ours.assign(d_head=[1, 1, 2]), ["d_head"], "p50_ms")
