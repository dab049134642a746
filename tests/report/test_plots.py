"""What is drawn where, in which colour, and what is written beside it."""

import inspect
import io
import os
import subprocess
import sys
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.text import Text
from PIL import Image

from cs336_systems.measure.kernel_names import CLASSES
from cs336_systems.names import ATTENTION
from cs336_systems.report import bars, heatmap, lines, ratio, stacked_bars, states, trace, tradeoff
from cs336_systems.report.labels import FAMILIES
from cs336_systems.report.marks import spread
from cs336_systems.report.style import PAPER, ZONE

BY_CONTEXT = {"x": "context_length", "hue": "implementation"}
PLAIN, COMPILED = ATTENTION["plain"].color.lower(), ATTENTION["compiled"].color.lower()


@pytest.fixture
def strategies() -> pd.DataFrame:
    names = ["none", "every 1", "every 2", "every 4", "sqrt_n", "recursive"]
    memory = [34560, 3560, 3360, 4880, 6800, 1480]
    times = [300, 400, 400, 400, 400, 600]
    return pd.DataFrame({"strategy": names, "peak_memory_mib": memory, "p50_ms": times})


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
def every_kind(rows, strategies, shares):
    steps = pd.DataFrame({"step_index": range(6), "step_ms": [90.0, 12, 10, 10, 11, 10]})
    return {
        "lines": lambda: lines(rows, **BY_CONTEXT, title="Lines"),
        "bars": lambda: bars(rows, **BY_CONTEXT, y="p50_ms", title="Bars"),
        "heatmap": lambda: heatmap(rows, "implementation", "context_length", title="Heat map"),
        "ratio": lambda: ratio(rows, **BY_CONTEXT, baseline="plain", title="Ratio"),
        "trace": lambda: trace(steps, warmup=2, title="Trace"),
        "tradeoff": lambda: tradeoff(strategies, title="Trade-off"),
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
        (round(p.get_x() + p.get_width() / 2, 3), to_hex(p.get_facecolor())): p.get_height() for p in patches
    }


def test_pictures_are_whole_small_and_the_same_twice(every_kind):
    for kind, draw in every_kind.items():
        chart, png = draw(), draw().png()
        assert png == chart.png(), kind
        pixels = np.asarray(Image.open(io.BytesIO(png)).convert("L"))
        assert pixels.shape[1] == 1472, kind
        assert len(png) < 150_000, kind
        assert (pixels[[0, 1, 2, -3, -2, -1]] == 255).all(), f"{kind}: ink at the edge"
        assert (pixels[:, [0, 1, 2, -3, -2, -1]] == 255).all(), f"{kind}: ink at the edge"
        for text in [*chart.texts, *(text for axes in chart.axes for text in axes.texts)]:
            assert all(chart.bbox.contains(*corner) for corner in text.get_window_extent().corners()), (
                kind,
                text,
            )


def test_another_process_draws_the_same_vectors():
    code = textwrap.dedent("""
        import pandas as pd
        from cs336_systems.report import lines
        rows = pd.DataFrame({"context_length": [128, 256] * 2, "p50_ms": [1.0, 2, 3, None]})
        rows = rows.assign(status=["ok"] * 3 + ["oom"], dtype=["float32"] * 2 + ["bfloat16"] * 2)
        svg = lines(rows, "context_length", hue="dtype", title="Twice").svg()
    """)
    here: dict = {}
    exec(code, here)
    command = [sys.executable, "-c", f"{code}\nimport sys\nsys.stdout.buffer.write(svg)"]
    there = subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "7"})
    assert there.stdout == here["svg"]


def test_a_cell_shows_a_chart_once_and_says_nothing_that_changes(rows, monkeypatch):
    shown, before = [], dict(plt.rcParams)
    monkeypatch.setattr("IPython.display.display", lambda *data, **options: shown.append((data, options)))
    chart = lines(rows, **BY_CONTEXT, title="Time")
    chart._ipython_display_()
    (((bundle,), options),) = shown
    assert bundle == {"image/png": chart.png(), "text/plain": "<figure>"}
    assert options["metadata"]["image/png"]["alt"] == "Time"
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == before


def test_words_around_the_panels_are_the_callers_or_the_columns(rows):
    named = lines(rows, **BY_CONTEXT, title="Finding", subtitle="in ms", ylabel="time", xlabel="tokens")
    assert {"Finding", "in ms", "time", "tokens"} <= set(texts(named))
    assert {"median time (ms)", "context length (tokens)"} <= set(texts(lines(rows, **BY_CONTEXT)))
    assert {"title", "subtitle", "xlabel", "ylabel", "empty"} <= set(inspect.signature(lines).parameters)
    with pytest.raises(TypeError, match="titel"):
        lines(rows, **BY_CONTEXT, titel="Finding")


def test_lines_are_of_their_colour_and_values(rows):
    found = {to_hex(line.get_color()): line for line in drawn(lines(rows.iloc[::-1], **BY_CONTEXT))}
    assert set(found) == {PLAIN, COMPILED}
    assert np.allclose(found[PLAIN].get_xydata(), [[256, 1.0], [512, 4.0]])


def test_a_name_has_one_colour_in_every_plot(rows):
    extra = pd.concat([rows, rows[rows["implementation"] == "plain"].assign(implementation="flash_triton")])
    for chart in (lines(extra, **BY_CONTEXT), bars(extra, "context_length", "p50_ms", "implementation")):
        used = {to_hex(line.get_color()) for line in drawn(chart)} | {color for _, color in bar_tops(chart)}
        assert used == {ATTENTION[name].color.lower() for name in ("plain", "compiled", "flash_triton")}


def test_a_plot_can_show_every_implementation(rows):
    every = pd.concat([rows.iloc[:2].assign(implementation=name) for name in ATTENTION])
    labels = [entry.label for entry in ATTENTION.values()]
    assert legend(lines(every, **BY_CONTEXT))[: len(labels)] == labels
    assert legend(bars(every, "context_length", "p50_ms", "implementation")) == labels


def test_the_band_is_drawn_and_explained_where_it_can_be_seen(rows):
    chart = lines(rows, **BY_CONTEXT)
    assert legend(chart) == ["plain", "compiled", "band: 20th to 80th percentile"]
    edges = {
        to_hex(area.get_facecolor()[0]): set(np.round(area.get_paths()[0].vertices[:, 1], 6))
        for area in chart.axes[0].collections
    }
    assert edges[PLAIN] == {0.9, 1.2, 3.6, 4.8}
    narrow = rows.assign(p20_ms=rows["p50_ms"], p80_ms=rows["p50_ms"])
    for chart in (lines(rows, **BY_CONTEXT, band=None), lines(narrow, **BY_CONTEXT)):
        assert not any("band" in text for text in texts(chart))


def test_lines_that_end_together_are_named_at_their_ends(rows):
    chart = lines(rows[rows["status"] == "ok"].query("context_length < 1024"), **BY_CONTEXT, band=None)
    assert legend(chart) == []
    named = {text.get_text(): text.xy for text in chart.axes[0].texts}
    assert named == {"plain": (512, 4.0), "compiled": (512, 1.0)}


def test_contexts_are_ticked_as_they_are_and_many_places_at_powers(rows):
    chart = lines(rows, **BY_CONTEXT)
    chart.draw_without_rendering()
    assert [label.get_text() for label in chart.axes[0].get_xticklabels()] == ["256", "512", "1K"]
    many = pd.DataFrame({"intensity": [7.3 * 1.9**step for step in range(14)], "p50_ms": range(1, 15)})
    ticks = lines(many, "intensity", band=None).axes[0].get_xticks()
    assert all(np.log10(tick) % 1 == pytest.approx(0) for tick in ticks)


def test_names_stand_along_the_axis_in_their_order():
    rows = pd.DataFrame({"model_size": ["xl", "small", "medium"], "p50_ms": [3.0, 1.0, 2.0]})
    chart = lines(rows, "model_size")
    assert [label.get_text() for label in chart.axes[0].get_xticklabels()] == ["small", "medium", "xl"]
    assert drawn(chart)[0].get_ydata().tolist() == [1.0, 2.0, 3.0]


def test_tiny_numbers_are_powers_of_ten_and_others_plain():
    def labels(*errors):
        chart = lines(pd.DataFrame({"step": [1, 2], "error": errors}), "step", "error", band=None)
        chart.draw_without_rendering()
        return [tick.get_text() for tick in chart.axes[0].get_yticklabels()]

    assert all("10^" in label for label in labels(1e-7, 1e-2))
    assert not any("^" in label or "e" in label for label in labels(1e-3, 10))


def test_out_of_memory_is_written_on_every_kind_of_plot(every_kind, rows):
    for kind in ("lines", "bars", "heatmap"):
        assert "OOM" in texts(every_kind[kind]()), kind
    assert "plain OOM" in texts(every_kind["ratio"]())
    lost = rows[rows["status"] == "oom"]
    for chart in (lines(lost, **BY_CONTEXT), bars(lost, **BY_CONTEXT, y="p50_ms")):
        assert "OOM" in texts(chart)
    assert "OOM" in texts(heatmap(lost, "implementation", "context_length"))


def test_a_failure_is_a_cross_of_its_line_s_colour_above_all_data(rows):
    chart = lines(rows, **BY_CONTEXT)
    (axes,) = chart.axes
    (cross,) = [text for text in axes.texts if text.get_text() == "×"]
    assert (to_hex(cross.get_color()), cross.xy[0]) == (PLAIN, 1024)
    zone = next(
        patch for patch in axes.artists + list(axes.patches) if to_hex(patch.get_facecolor()) == ZONE.lower()
    )
    top = axes.transAxes.inverted().transform(axes.transData.transform((512, rows["p80_ms"].max())))[1]
    assert top < zone.get_y()


def test_machines_look_the_same_everywhere(places):
    chart = lines(places[places["implementation"] == "compiled"], **BY_CONTEXT)
    looks = {
        (line.get_linestyle(), to_hex(line.get_markerfacecolor()) == PAPER.lower()) for line in drawn(chart)
    }
    assert looks == {("-", False), ("--", False), ("--", True)}  # filled, dashed, hollow
    machines = ["H200 (reference)", "cpu-2 (this machine)", "RTX 5090, a report (published)"]
    assert set(machines) <= set(legend(lines(places, **BY_CONTEXT)))
    chart = bars(places, "context_length", "p50_ms", "implementation")
    assert set(machines) <= set(legend(chart))
    assert {patch.get_hatch() for group in chart.axes[0].containers for patch in group} == {None, "////"}


def test_a_single_machine_is_not_in_the_legend(places):
    one = places[places["where"] == "this machine: cpu-2"]
    assert not any("machine" in text for text in texts(lines(one, **BY_CONTEXT)))
    assert not any(
        "machine" in text for text in texts(bars(one, "context_length", "p50_ms", "implementation"))
    )


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


def test_a_ratio_divides_and_has_its_line_at_one(rows):
    chart = ratio(rows, **BY_CONTEXT, baseline="plain")
    ydata = [list(line.get_ydata()) for line in drawn(chart)]
    assert [1, 1] in ydata
    assert any(np.allclose(values, [2.0, 4.0]) for values in ydata if len(values) == 2)
    assert "times faster than plain" in texts(chart)


def test_a_linear_axis_reaches_the_level_that_gives_it_its_meaning(rows):
    bottom, top = lines(rows, **BY_CONTEXT, logy=False).axes[0].get_ylim()
    assert bottom == 0 < 8 < top
    faster = rows.assign(p50_ms=rows["p50_ms"].where(rows["implementation"] == "plain", 0.1))
    bottom, top = ratio(faster, **BY_CONTEXT, baseline="plain").axes[0].get_ylim()
    assert 0 <= bottom < 1 < 40 < top


def test_rows_in_one_place_and_ratios_of_mixed_rows_are_refused(rows):
    both = pd.concat([rows, rows.assign(batch_size=4)])
    mixed = rows.assign(batch_size=rows["implementation"].map({"plain": 8, "compiled": 4}))
    for refused in (
        lambda: lines(both, **BY_CONTEXT),
        lambda: bars(both, y="p50_ms", **BY_CONTEXT),
        lambda: heatmap(both, "implementation", "context_length"),
        lambda: ratio(mixed, **BY_CONTEXT, baseline="plain"),
    ):
        with pytest.raises(ValueError, match="differ in batch_size"):
            refused()


def test_missing_columns_are_named(rows, shares, strategies):
    for refused in (
        lambda: lines(rows, "context_length", "nothing"),
        lambda: stacked_bars(shares, "context_length", part="nothing"),
        lambda: tradeoff(strategies, label="nothing"),
        lambda: states(rows, "context_length", {"nothing": "nothing"}),
    ):
        with pytest.raises(ValueError, match="no column nothing"):
            refused()


def test_empty_rows_say_what_to_run(rows, every_kind):
    assert any("cs336_systems run" in text for text in texts(every_kind["empty"]()))
    none = rows.iloc[:0]
    for chart in (
        bars(none, "model_size", empty="ask"),
        heatmap(none, "model_size", "pass", empty="ask"),
        ratio(none, "model_size", "pass", baseline="forward", empty="ask"),
        ratio(rows.iloc[:3], **BY_CONTEXT, baseline="plain", empty="ask"),
        trace(none, empty="ask"),
        tradeoff(rows[rows["status"] == "oom"], "batch_size", label="pass", empty="ask"),
    ):
        assert "ask" in texts(chart)


def test_warm_up_steps_are_shaded():
    steps = pd.DataFrame({"step_index": range(6), "step_ms": [90.0, 12, 10, 10, 11, 10]})
    (span,) = trace(steps, warmup=2).axes[0].patches
    assert (span.get_x(), span.get_x() + span.get_width()) == (-0.5, 1.5)


def test_bars_stand_in_their_group_with_their_value_above(rows):
    chart = bars(rows, **BY_CONTEXT, y="p50_ms")
    tops = bar_tops(chart)
    left, right = -0.21, 0.21
    expected = {
        (left, PLAIN): 1.0,
        (right, COMPILED): 0.5,
        (1 + left, PLAIN): 4.0,
        (1 + right, COMPILED): 1.0,
    }
    assert tops == pytest.approx(expected | {(2 + right, COMPILED): 8.0})
    labels = {text.get_text(): text.xy[0] for text in chart.axes[0].texts}
    assert labels["4.00"] == pytest.approx(1 + left)
    assert labels["OOM"] == pytest.approx(2 + left)


def test_a_bar_alone_in_its_group_stands_in_the_middle(rows):
    few = rows[(rows["implementation"] == "compiled") | (rows["context_length"] == 512)]
    assert (0.0, COMPILED) in bar_tops(bars(few, **BY_CONTEXT, y="p50_ms"))


def test_long_names_of_bars_go_on_two_lines(rows):
    few = rows.head(1)
    models = pd.concat([few.assign(model=f"model {number} (2025)") for number in range(12)])
    for frame, ends in ((models.head(1), "0 (2025)"), (models, "0\n(2025)")):
        chart = bars(frame, "model", "p50_ms", "implementation")
        assert chart.axes[0].get_xticklabels()[0].get_text() == f"model {ends}"


def test_stacks_add_up_ranges_from_the_first_class_on(shares):
    chart = stacked_bars(shares, "context_length")
    assert chart.axes[0].containers[0].datavalues.tolist() == [80, 160]
    first = FAMILIES["class"][0][CLASSES[0]].color.lower()
    assert to_hex(chart.axes[0].containers[0][0].get_facecolor()) == first
    assert chart.axes[0].containers[0][0].get_y() == 0
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


def test_cells_have_their_value_or_say_why_not(rows):
    chart = heatmap(rows, "implementation", "context_length", fmt="{:.2f}")
    (axes,) = chart.axes
    cells = {(text.get_position(), text.get_text()) for text in axes.texts}
    assert cells >= {((0.5, 0.5), "1.00"), ((1.5, 0.5), "4.00"), ((2.5, 0.5), "OOM"), ((2.5, 1.5), "8.00")}
    assert [patch.get_hatch() for patch in axes.patches] == ["////"]
    assert "–" in texts(heatmap(rows.iloc[1:], "implementation", "context_length"))


def test_a_heat_map_is_read_from_the_top_in_every_panel(rows):
    both = pd.concat([rows, rows.assign(dtype="bfloat16")]).fillna({"dtype": "float32"})
    for axes in heatmap(both, "implementation", "context_length", facet="dtype", middle=1).axes:
        assert axes.get_ylim() == (2, 0)
        assert [text.get_position()[1] for text in axes.texts if text.get_text() == "4.00"] == [0.5]


def test_states_have_a_panel_and_an_axis_for_each_quantity():
    frame = pd.DataFrame({"tile": [1, 2, 3] * 2, "query": ["a"] * 3 + ["b"] * 3, "m": [0.0, 1, 1, 5, 5, 9]})
    frame["error"] = [1, 0.1, 0, 1, 1, 0]
    chart = states(frame, "tile", {"m": "maximum", "error": "error"}, "query", logarithmic=["error"])
    left, right = chart.axes
    assert (left.get_title(loc="left"), right.get_title(loc="left")) == ("maximum", "error")
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "log")
    assert left.get_ylim()[1] > 9 > right.get_ylim()[1]
    assert [len(line.get_xdata()) for line in right.get_lines()] == [
        2,
        2,
    ]  # an error of zero has no logarithm
    assert {line.get_drawstyle() for line in left.get_lines()} == {"steps-post"}
    assert legend(chart) == ["a", "b"]


def test_names_of_points_do_not_cover_each_other(strategies):
    chart = tradeoff(strategies)
    level = [text.get_window_extent() for text in chart.axes[0].texts if text.get_rotation() == 0]
    assert len(level) >= 2
    assert not any(a.overlaps(b) for i, a in enumerate(level) for b in level[:i])
    twins = pd.concat([strategies, strategies.assign(strategy="twin of " + strategies["strategy"])])
    assert "recursive, twin of recursive" in texts(tradeoff(twins))


@given(st.lists(st.floats(0, 500), min_size=1, max_size=8))
def test_labels_are_moved_apart_and_keep_their_order(places):
    moved = spread(places, 13.0)
    order = np.argsort(places, kind="stable")
    assert np.all(np.diff(moved[order]) >= 13.0 - 1e-6)
    assert np.mean(moved) == pytest.approx(np.mean(places), abs=1e-6)
    if np.all(np.diff(np.sort(places)) >= 13.0):
        assert moved == pytest.approx(places)
