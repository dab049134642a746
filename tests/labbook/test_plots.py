"""What is drawn where, in which colour, and what is written beside it."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.text import Text

from cs336_systems.measure.kernel_names import CLASSES
from labbook import bars, heatmap, lines, ratio, stacked_bars, tradeoff
from labbook.style import BLUE, VERMILLION

BY_CONTEXT = {"x": "context_length", "hue": "implementation"}
PLAIN, COMPILED = BLUE.lower(), VERMILLION.lower()


@pytest.fixture
def shares() -> pd.DataFrame:
    """Kernel rows of two contexts: all classes, and the time doubles."""
    return pd.DataFrame(
        {"model_size": "small", "context_length": context, "range": where, "class": name, "total_ms": time}
        for context in (128, 256)
        for where in ("measure/forward", "measure/backward")
        for name in CLASSES
        for time in [context / 128 * (40 if name == CLASSES[0] else 1)]
    )


@pytest.fixture
def every_kind(rows, shares):
    return {
        "lines": lambda: lines(rows, **BY_CONTEXT, title="Lines"),
        "bars": lambda: bars(rows, **BY_CONTEXT, title="Bars"),
        "heatmap": lambda: heatmap(rows, "implementation", "context_length", title="Heat map"),
        "ratio": lambda: ratio(rows, **BY_CONTEXT, baseline="plain", title="Ratio"),
        "stacked": lambda: stacked_bars(shares, "context_length", share=True, facet="range", title="Shares"),
        "empty": lambda: lines(rows.iloc[:0], **BY_CONTEXT, title="Empty"),
    }


def texts(chart) -> list[str]:
    return [text.get_text() for text in chart.findobj(Text) if text.get_text()]


def drawn(chart) -> list[Line2D]:
    return [line for axes in chart.axes for line in axes.get_lines() if len(line.get_xdata()) > 1]


def legend(chart) -> list[str]:
    return [text.get_text() for each in chart.legends for text in each.get_texts()]


def bar_tops(chart) -> dict[tuple[float, str], float]:
    """Height of each bar, by its middle and colour."""
    patches = [patch for axes in chart.axes for group in axes.containers for patch in group]
    return {
        (round(p.get_x() + p.get_width() / 2, 3), to_hex(p.get_facecolor())): p.get_height()
        for p in patches
        if p.get_height() > 0
    }


def test_pictures_are_whole_and_small_and_a_cell_shows_them_once(every_kind, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *data, **options: shown.append((data, options)))
    for kind, draw in every_kind.items():
        chart = draw()
        chart._ipython_display_()
        (((bundle,), options),) = shown
        shown.clear()
        assert bundle == {"image/png": chart.png(), "text/plain": "<figure>"}, kind
        assert options["metadata"]["image/png"]["alt"] == chart.title, kind
        assert len(bundle["image/png"]) < 150_000, kind
        for text in [*chart.texts, *(text for axes in chart.axes for text in axes.texts)]:
            assert all(chart.bbox.contains(*corner) for corner in text.get_window_extent().corners()), kind


def test_words_around_the_panels_are_the_callers_or_the_columns(rows):
    named = lines(rows, **BY_CONTEXT, title="Finding", subtitle="in ms", ylabel="time", xlabel="tokens")
    assert {"Finding", "in ms", "time", "tokens"} <= set(texts(named))
    assert {"median time (ms)", "context length (tokens)"} <= set(texts(lines(rows, **BY_CONTEXT)))
    with pytest.raises(TypeError, match="titel"):
        lines(rows, **BY_CONTEXT, titel="Finding")


def test_lines_are_of_their_colour_and_values(rows):
    found = {to_hex(line.get_color()): line for line in drawn(lines(rows.iloc[::-1], **BY_CONTEXT))}
    assert set(found) == {PLAIN, COMPILED}
    assert np.allclose(found[PLAIN].get_xydata(), [[256, 1.0], [512, 4.0]])


def test_the_band_is_drawn_and_explained_where_it_can_be_seen(rows):
    chart = lines(rows, **BY_CONTEXT)
    assert legend(chart) == ["plain", "compiled", "band: 20th to 80th percentile"]
    edges = {
        to_hex(area.get_facecolor()[0]): set(np.round(area.get_paths()[0].vertices[:, 1], 6))
        for area in chart.axes[0].collections
    }
    assert edges[PLAIN] == {0.9, 1.2, 3.6, 4.8}
    narrow = rows.assign(p20_ms=rows["p50_ms"], p80_ms=rows["p50_ms"])
    assert legend(lines(narrow, **BY_CONTEXT)) == ["plain", "compiled"]


def test_ticks_are_contexts_powers_or_names_in_their_order(rows):
    def ticks(chart):
        chart.draw_without_rendering()
        return [label.get_text() for label in chart.axes[0].get_xticklabels()]

    assert ticks(lines(rows, **BY_CONTEXT)) == ["256", "512", "1K"]
    many = pd.DataFrame({"intensity": [7.3 * 1.9**step for step in range(14)], "p50_ms": range(1, 15)})
    assert all(np.log10(tick) % 1 == 0 for tick in lines(many, "intensity", band=None).axes[0].get_xticks())
    sizes = lines(pd.DataFrame({"model_size": ["xl", "small"], "p50_ms": [3.0, 1.0]}), "model_size")
    assert ticks(sizes) == ["small", "xl"]
    assert drawn(sizes)[0].get_ydata().tolist() == [1.0, 3.0]


def test_out_of_memory_is_written_on_every_kind_of_plot(every_kind, rows):
    for kind in ("lines", "bars", "heatmap"):
        assert "OOM" in texts(every_kind[kind]()), kind
    assert "plain OOM" in texts(every_kind["ratio"]())
    assert "OOM" in texts(lines(rows[rows["status"] == "oom"], **BY_CONTEXT))
    (axes,) = lines(rows, **BY_CONTEXT).axes
    (cross,) = [text for text in axes.texts if text.get_text() == "×"]
    assert (to_hex(cross.get_color()), cross.xy[0]) == (PLAIN, 1024)
    (zone,) = axes.patches
    top = axes.transAxes.inverted().transform(axes.transData.transform((512, rows["p80_ms"].max())))[1]
    assert top < zone.get_y()


def test_machines_are_told_apart(places):
    chart = lines(places[places["implementation"] == "compiled"], **BY_CONTEXT)
    assert len({str((line._dash_pattern, line.get_marker())) for line in drawn(chart)}) == 3
    machines = ["H200 (reference)", "cpu-2 (this machine)", "RTX 5090, a report (published)"]
    for chart in (lines(places, **BY_CONTEXT), bars(places, **BY_CONTEXT)):
        assert set(machines) <= set(legend(chart))
    assert len({patch.get_hatch() for group in chart.axes[0].containers for patch in group}) == 3
    one = places[places["where"] == "this machine: cpu-2"]
    assert not any("machine" in text for text in texts(lines(one, **BY_CONTEXT)))


def test_panels_share_their_limits_and_lose_no_line(rows):
    both = pd.concat([rows, rows.assign(d_head=128, p50_ms=10 * rows["p50_ms"])])
    for chart in (
        lines(both, **BY_CONTEXT, facet="d_head", logy=False),
        ratio(both, **BY_CONTEXT, baseline="plain", facet="d_head"),
    ):
        first, second = chart.axes
        assert first.get_ylim() == second.get_ylim()
        assert [axes.get_title("left") for axes in chart.axes] == ["d = 64", "d = 128"]
        for line in drawn(chart):
            assert max(line.get_ydata()) < first.get_ylim()[1]
    first, second = lines(both, **BY_CONTEXT, facet="d_head", sharey=False).axes
    assert first.get_ylim()[1] < second.get_ylim()[1]


def test_a_ratio_divides_and_has_its_line_at_one(rows):
    chart = ratio(rows, **BY_CONTEXT, baseline="plain")
    ydata = [list(line.get_ydata()) for line in drawn(chart)]
    assert [1, 1] in ydata
    assert any(np.allclose(values, [2.0, 4.0]) for values in ydata if len(values) == 2)
    assert "times faster than plain" in texts(chart)
    slower = rows.assign(p50_ms=rows["p50_ms"].where(rows["implementation"] == "plain", 40.0))
    bottom, top = ratio(slower, **BY_CONTEXT, baseline="plain").axes[0].get_ylim()
    assert bottom == 0 < 1 < top


def test_rows_in_one_place_are_refused(rows):
    both = pd.concat([rows, rows.assign(batch_size=4)])
    for refused in (
        lambda: lines(both, **BY_CONTEXT),
        lambda: bars(both, **BY_CONTEXT),
        lambda: heatmap(both, "implementation", "context_length"),
    ):
        with pytest.raises(ValueError, match=r"differ in .*batch_size"):
            refused()


def test_empty_rows_say_what_to_run(rows, every_kind):
    for chart in (every_kind["empty"](), ratio(rows.iloc[:3], **BY_CONTEXT, baseline="plain")):
        assert any("cs336_systems run" in text for text in texts(chart))


def test_bars_stand_in_their_group_with_their_value_above(rows):
    chart = bars(rows, **BY_CONTEXT)
    left, right = -0.21, 0.21
    expected = {
        (left, PLAIN): 1.0,
        (right, COMPILED): 0.5,
        (1 + left, PLAIN): 4.0,
        (1 + right, COMPILED): 1.0,
    }
    assert bar_tops(chart) == pytest.approx(expected | {(2 + right, COMPILED): 8.0})
    labels = {text.get_text(): text.xy[0] for text in chart.axes[0].texts}
    assert labels["4.00"] == pytest.approx(1 + left)
    assert labels["OOM"] == pytest.approx(2 + left)
    few = rows[(rows["implementation"] == "compiled") | (rows["context_length"] == 512)]
    assert (0.0, COMPILED) in bar_tops(bars(few, **BY_CONTEXT))  # alone in its group


def test_stacks_add_up_ranges_from_the_first_class_on(shares):
    chart = stacked_bars(shares, "context_length")
    first = chart.axes[0].containers[0]
    assert first.datavalues.tolist() == [80, 160]
    assert to_hex(first[0].get_facecolor()) == BLUE.lower()
    assert first[0].get_y() == 0
    assert {"100 ms", "200 ms"} <= set(texts(chart))
    assert legend(chart) == list(CLASSES)


def test_shares_are_parts_of_a_hundred(shares):
    chart = stacked_bars(shares, "context_length", share=True)
    assert sum(group.datavalues[0] for group in chart.axes[0].containers) == pytest.approx(100)
    assert "80" in texts(chart)
    unseen = shares.assign(total_ms=shares["total_ms"].mask(shares["class"] == "other", 1e-6))
    assert "other" not in legend(stacked_bars(unseen, "context_length", share=True))


def test_a_stack_of_two_configurations_is_refused(shares):
    other = pd.concat([shares, shares.assign(model_size="large")])
    with pytest.raises(ValueError, match=r"context_length=128.* model_size \(small, large\)"):
        stacked_bars(other, "context_length")
    assert stacked_bars(other, "context_length", facet="model_size").axes[1].get_title("left") == "large"


def test_cells_have_their_value_or_say_why_not_read_from_the_top(rows):
    both = pd.concat([rows, rows.assign(dtype="bfloat16")]).fillna({"dtype": "float32"})
    expected = {((0.5, 0.5), "1.00"), ((1.5, 0.5), "4.00"), ((2.5, 0.5), "OOM"), ((2.5, 1.5), "8.00")}
    for axes in heatmap(both, "implementation", "context_length", facet="dtype", middle=1).axes:
        assert axes.get_ylim() == (2, 0)
        assert {(text.get_position(), text.get_text()) for text in axes.texts} >= expected
    assert "–" in texts(heatmap(rows.iloc[1:], "implementation", "context_length", fmt="{:.1f}"))


def test_points_in_one_place_share_their_names():
    rows = pd.DataFrame(
        {"gib": [38.0, 38.01, 102.0, None], "ms": [1.8, 1.8, 1.7, 1.0], "which": list("abcd")}
    )
    (axes,) = tradeoff(rows, "gib", "ms", "which").axes
    assert [text.get_text() for text in axes.texts] == ["a, b", "c"]
    assert len(axes.collections[0].get_offsets()) == 3


def test_a_long_title_stays_on_the_picture(rows):
    title = "WIDE WORDS take MORE than others: " * 3
    chart = lines(rows, **BY_CONTEXT, title=title, subtitle=title)
    chart.draw_without_rendering()
    assert all(text.get_window_extent().x1 < chart.bbox.x1 for text in chart.texts)
