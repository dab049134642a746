import pandas as pd
import pytest

from labbook import compare
from labbook.compare import beside_published


def test_a_report_stands_beside_what_both_measured():
    ours = pd.DataFrame({"d_head": [1, 2, 3], "p50_ms": [1.0, None, 1.0], "status": "ok"})
    theirs = pd.DataFrame({"d_head": [1, 1, 2, 3, 4], "p50_ms": [3.0, 4.0, 5.0, None, 6.0]})
    theirs["gpu"] = list("abcde")
    both = beside_published(theirs, ours, ["d_head"], "p50_ms")
    assert both.to_dict("split", index=False)["data"] == [[1, 3, 1, 3, "a"], [1, 4, 1, 4, "b"]]
    with pytest.raises(ValueError, match="2 rows share d_head=1"):
        beside_published(theirs, ours.assign(d_head=[1, 1, 2]), ["d_head"], "p50_ms")


def test_rows_that_are_equal_are_refused_as_duplicates(rows):
    with pytest.raises(ValueError, match=r"context_length=256.* duplicates"):
        compare.require_one_row_each(pd.concat([rows, rows]), "context_length", "implementation")
