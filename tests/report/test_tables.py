import pandas as pd
import pytest

from cs336_systems.report.html import Table
from cs336_systems.report.tables import as_text, pivot


def html(frame, caption=""):
    return Table(as_text(frame), caption)._repr_html_()


def test_a_pivot_writes_out_memory_and_units(rows):
    table = pivot(rows, "implementation", "context_length")
    assert table.columns.tolist() == [
        ("median time (ms) by context length (tokens)", context) for context in ("256", "512", "1K")
    ]
    assert table.loc["eager"].tolist() == ["1.000", "4.00", "OOM"]
    assert table.loc["compiled"].tolist() == ["0.500", "1.00", "8.00"]


def test_a_cell_that_was_not_measured_is_a_dash(rows):
    assert pivot(rows.iloc[1:], "implementation", "context_length").loc["eager"].tolist() == [
        "–",
        "4.00",
        "OOM",
    ]


def test_two_values_stand_side_by_side_and_fmt_rules(rows):
    table = pivot(rows, ["implementation", "pass"], "context_length", ["p50_ms", "p80_ms"], fmt="{:.1f}")
    assert table.shape == (2, 6)
    assert table.index.names == ["implementation", "pass"]
    assert table.loc[("eager", "forward")].tolist() == ["1.0", "4.0", "OOM", "1.2", "4.8", "OOM"]


def test_a_later_value_has_no_empty_columns(rows):
    half = rows.assign(p80_ms=rows["p80_ms"].where(rows["context_length"] == 512))
    half = half[half["status"] == "ok"]
    table = pivot(half.assign(p20_ms=float("nan")), "implementation", "context_length", ["p20_ms", "p80_ms"])
    assert [place for _, place in table.columns] == ["256", "512", "1K", "512"]


def test_two_rows_in_one_cell_are_refused(rows):
    with pytest.raises(ValueError, match="differ in implementation"):
        pivot(rows, "pass", "context_length")


def test_html_is_the_same_twice_and_brings_no_colours(rows):
    table = pivot(rows, "implementation", "context_length")
    assert html(table) == html(pivot(rows, "implementation", "context_length"))
    assert "color" not in html(table)
    assert "OOM" in html(table)
    assert '<th colspan="3" style="text-align: center">median time (ms)' in html(table)


def test_html_has_as_many_cells_in_each_line(rows):
    text = html(pivot(rows, ["pass", "implementation"], "context_length"))
    body = text.split("<tbody>")[1].splitlines()[1:3]
    assert [line.count("</th>") + line.count("</td>") for line in body] == [5, 5]
    assert body[1].startswith('<tr><th style="text-align: left"></th>')  # "forward" is not repeated


def test_raw_rows_get_readable_headers_and_numbers(rows):
    table = as_text(rows)
    assert "median time (ms)" in table
    assert table["context length (tokens)"].tolist()[:3] == ["256", "512", "1K"]
    assert table["median time (ms)"].tolist()[2] == "OOM"


def test_markup_in_cells_and_captions_is_escaped():
    text = html(pd.DataFrame({"case": ["<b>&"]}), "a < b")
    assert "&lt;b&gt;&amp;" in text
    assert "a &lt; b" in text


def test_no_rows_say_so(rows):
    none = rows.iloc[:0]
    for table in (none, pivot(none, "implementation", "context_length")):
        assert "no rows yet" in html(table)
        assert "no rows yet" in repr(Table(as_text(table)))
