import re

import pandas as pd
import pytest

from labbook.tables import as_html, as_text, pivot, show


def test_a_pivot_writes_out_memory_and_units(rows):
    table = pivot(rows[::-1], "implementation", "context_length")
    header = "median time (ms) by context length (tokens)"
    assert table.columns.tolist() == [(header, context) for context in ("256", "512", "1K")]
    assert table.index.tolist() == ["plain", "compiled"]
    assert table.loc["plain"].tolist() == ["1.000", "4.00", "OOM"]
    assert table.loc["compiled"].tolist() == ["0.500", "1.00", "8.00"]
    assert pivot(rows[1:], "implementation", "context_length").loc["plain"].tolist()[0] == "–"


def test_several_keys_and_values_and_a_format(rows):
    keys = ["implementation", "pass"]
    table = pivot(rows, keys, "context_length", ["p50_ms", "p80_ms"], fmt="{:.1f}")
    assert table.loc[("plain", "forward")].tolist() == ["1.0", "4.0", "OOM", "1.2", "4.8", "OOM"]


def test_a_key_may_be_missing_and_two_rows_in_a_cell_are_refused(rows):
    gaps = rows[rows["context_length"] == 256].assign(bucket_size_mb=[25.0, None])
    places = pivot(gaps, ["bucket_size_mb", "implementation"], "context_length").index
    assert places.tolist() == [("25", "plain"), ("–", "compiled")]
    with pytest.raises(ValueError, match="implementation"):
        pivot(rows, "pass", "context_length")


def test_html_has_the_cells_of_the_text_words_to_the_left(rows):
    table = pivot(rows, ["pass", "implementation"], "context_length")
    html = as_html(as_text(table))
    assert re.findall("<td>(.*)</td>", html) == table.to_numpy().flatten().tolist()
    assert html.count("forward") == 1  # the pass is written once for both lines
    table = pd.DataFrame({"why": ["because"], "calls": [12]})
    html = as_html(as_text(table))
    assert '<div style="text-align: left">because</div>' in html
    assert "<td>12</td>" in html


def test_markup_is_escaped_a_folded_table_shows_its_caption_and_no_rows_say_so(rows, shown):
    table = pd.DataFrame({"code": ["<b>&"]})
    show(table, "a < b", folded=True)
    (bundle,) = shown
    html = bundle["text/html"]
    assert "&lt;b&gt;&amp;" in html
    assert html.startswith("<details><summary>a &lt; b</summary>")
    none = rows[:0]
    for table in (none, pivot(none, "implementation", "context_length")):
        show(table)
        assert all("no rows" in text for text in shown.pop().values())


@pytest.mark.parametrize(
    ("times", "texts"),
    [
        ([0.4, 31.25, 12345.0], ["0.4", "31.2", "12,345.0"]),
        ([0.0, 0.0004, 1.0], ["0.000", "4.0e-04", "1.000"]),
    ],
)
def test_no_number_is_shown_as_zero(times, texts):
    assert as_text(pd.DataFrame({"p50_ms": times})).iloc[:, 0].tolist() == texts
