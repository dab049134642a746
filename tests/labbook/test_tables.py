import re

import pandas as pd
import pytest

from labbook.tables import as_html, as_text, pivot, show


def test_a_pivot_writes_out_memory_and_units(rows):
    table = pivot(rows.iloc[::-1], "implementation", "context_length")
    header = "median time (ms) by context length (tokens)"
    assert table.columns.tolist() == [(header, context) for context in ("256", "512", "1K")]
    assert table.index.tolist() == ["plain", "compiled"]
    assert table.to_numpy().tolist() == [["1.000", "4.00", "OOM"], ["0.500", "1.00", "8.00"]]
    without_first = pivot(rows.iloc[1:], "implementation", "context_length")
    assert without_first.loc["plain"].tolist()[0] == "–"


def test_several_keys_and_values_and_a_format(rows):
    keys = ["implementation", "pass"]
    table = pivot(rows, keys, "context_length", ["p50_ms", "p80_ms"], fmt="{:.1f}")
    assert table.loc[("plain", "forward")].tolist() == ["1.0", "4.0", "OOM", "1.2", "4.8", "OOM"]


def test_columns_of_later_values_are_left_out_when_empty(rows):
    rows = rows[rows["status"] == "ok"]
    p80_ms = rows["p80_ms"].where(rows["context_length"] == 512)
    rows = rows.assign(p20_ms=float("nan"), p80_ms=p80_ms)
    table = pivot(rows, "implementation", "context_length", ["p20_ms", "p80_ms"])
    assert [place for _, place in table.columns] == ["256", "512", "1K", "512"]


def test_a_key_may_be_missing_and_two_rows_in_a_cell_are_refused(rows):
    gaps = rows[rows["context_length"] == 256].assign(bucket_size_mb=[25.0, None])
    table = pivot(gaps, ["bucket_size_mb", "implementation"], "context_length")
    assert table.index.tolist() == [("25", "plain"), ("–", "compiled")]
    with pytest.raises(ValueError, match="implementation"):
        pivot(rows, "pass", "context_length")


def test_html_has_the_cells_of_the_text_words_to_the_left(rows):
    table = pivot(rows, ["pass", "implementation"], "context_length")
    html = as_html(as_text(table))
    assert re.findall("<td>(.*)</td>", html) == list(table.to_numpy().flatten())
    assert html.count("forward") == 1  # the pass is written once for both lines
    html = as_html(as_text(pd.DataFrame({"why": ["because"], "calls": [12]})))
    assert '<div style="text-align: left">because</div>' in html
    assert "<td>12</td>" in html


def test_markup_is_escaped_a_folded_table_shows_its_caption_and_no_rows_say_so(rows, shown):
    show(pd.DataFrame({"code": ["<b>&"]}), "a < b", folded=True)
    assert "&lt;b&gt;&amp;" in shown[0]["text/html"]
    assert shown[0]["text/html"].startswith("<details><summary>a &lt; b</summary>")
    show(rows.iloc[:0])
    show(pivot(rows.iloc[:0], "implementation", "context_length"))
    assert all("no rows" in text for bundle in shown[1:] for text in bundle.values())


def test_no_number_is_shown_as_zero():
    times = pd.DataFrame({"p50_ms": [0.4, 31.25, 12345.0]})
    assert as_text(times).iloc[:, 0].tolist() == ["0.4", "31.2", "12,345.0"]
    times = pd.DataFrame({"p50_ms": [0.0, 0.0004, 1.0]})
    assert as_text(times).iloc[:, 0].tolist() == ["0.000", "4.0e-04", "1.000"]
