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

from cs336_systems.report.marks import spread
from cs336_systems.report.plots import grouped_bars, heatmap, ratio, save, sweep, trace
from cs336_systems.report.style import COLORS, PAPER, ZONE

COLOR = COLORS["implementation"]
BY_CONTEXT = {"x": "context_length", "hue": "implementation"}


def texts(chart) -> list[str]:
    return [text.get_text() for text in chart.findobj(Text) if text.get_text()]


def lines(chart) -> list[Line2D]:
    return [line for axes in chart.axes for line in axes.get_lines() if len(line.get_xdata()) > 1]


def every_kind(rows) -> dict:
    steps = pd.DataFrame({"step": range(6), "step_ms": [90.0, 12, 10, 10, 11, 10]})
    return {
        "sweep": sweep(rows, **BY_CONTEXT, title="Sweep"),
        "bars": grouped_bars(rows, **BY_CONTEXT, y="p50_ms", title="Bars"),
        "heatmap": heatmap(rows, "implementation", "context_length", title="Heat map"),
        "ratio": ratio(rows, **BY_CONTEXT, baseline="eager", title="Ratio"),
        "trace": trace(steps, warmup=2, title="Trace"),
        "empty": sweep(rows.iloc[:0], **BY_CONTEXT, title="Empty"),
    }


def test_every_kind_is_of_the_right_size(rows):
    for kind, chart in every_kind(rows).items():
        png = chart.png()
        assert Image.open(io.BytesIO(png)).width == 1472, kind
        assert len(png) < 150_000, kind


def test_nothing_is_cut_off(places):
    for kind, chart in every_kind(places[places["where"] == "reference: H200"]).items():
        pixels = np.asarray(Image.open(io.BytesIO(chart.png())).convert("L"))
        inside = pixels[3:-3, 3:-3]
        assert pixels.sum() - inside.sum() == 255 * (pixels.size - inside.size), f"{kind}: ink at the edge"
        width, height = chart.bbox.size
        for text in [*chart.texts, *(text for axes in chart.axes for text in axes.texts)]:
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= width, (kind, text)
            assert 0 <= box.y0 < box.y1 <= height, (kind, text)


def test_bytes_repeat_in_one_process(rows):
    first, second = every_kind(rows), every_kind(rows)
    for kind in first:
        assert first[kind].png() == second[kind].png() == first[kind].png(), kind
        assert first[kind].svg() == second[kind].svg() == first[kind].svg(), kind


def test_bytes_repeat_in_another_process(tmp_path, monkeypatch):
    code = textwrap.dedent("""
        import pandas as pd
        from cs336_systems.report.plots import save, sweep
        rows = pd.DataFrame({"context_length": [128, 256] * 2, "p50_ms": [1.0, 2, 3, None]})
        rows = rows.assign(status=["ok"] * 3 + ["oom"], dtype=["float32"] * 2 + ["bfloat16"] * 2)
        save(sweep(rows, "context_length", hue="dtype", title="Twice"), "slug", "stem", "h200")
    """)
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path / "here"))
    exec(code, {})
    there = os.environ | {"CS336_FIGURES": str(tmp_path / "there"), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], check=True, env=there)
    for name in ("stem.png", "stem.svg"):
        here, there = (tmp_path / place / "h200" / "slug" / name for place in ("here", "there"))
        assert here.read_bytes() == there.read_bytes(), name


def test_saving_hands_the_chart_back(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    chart = sweep(rows, **BY_CONTEXT)
    assert save(chart, "slug", "stem", "h200") is chart
    assert (tmp_path / "h200/slug/stem.png").read_bytes() == chart.png()


def test_a_cell_shows_a_chart_once_and_says_nothing_that_changes(rows, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *data, **options: shown.append((data, options)))
    chart = sweep(rows, **BY_CONTEXT, title="Time")
    chart._ipython_display_()
    (((bundle,), options),) = shown
    assert bundle == {"image/png": chart.png(), "text/plain": "<figure>"}
    assert options["metadata"]["image/png"]["alt"] == "Time"
    assert plt.get_fignums() == []


def test_a_sweep_has_a_line_of_its_colour_for_each_implementation(rows):
    drawn = {to_hex(line.get_color()).upper(): line for line in lines(sweep(rows, **BY_CONTEXT))}
    assert set(drawn) == {COLOR["eager"], COLOR["compiled"]}
    assert drawn[COLOR["eager"]].get_xydata().tolist() == [[256, 1.0], [512, 4.0]]


def test_contexts_are_ticked_as_they_are(rows):
    chart = sweep(rows, **BY_CONTEXT)
    chart.draw_without_rendering()
    labels = [label.get_text() for label in chart.axes[0].get_xticklabels()]
    assert labels == ["256", "512", "1K"]
    assert not any("$" in text for text in texts(chart))


def test_many_places_on_a_logarithm_have_round_ticks():
    rows = pd.DataFrame({"intensity": [7.3 * 1.9**step for step in range(14)], "p50_ms": range(1, 15)})
    ticked = sweep(rows, "intensity", band=None).axes[0].get_xticks()
    assert {10, 100, 1000, 10_000} <= set(ticked)
    assert all(np.log10(tick) % 1 == pytest.approx(0) for tick in ticked)


def test_out_of_memory_is_written_on_every_kind_of_plot(rows):
    for kind in ("sweep", "bars", "heatmap"):
        assert "OOM" in texts(every_kind(rows)[kind]), kind
    assert "eager OOM" in texts(ratio(rows, **BY_CONTEXT, baseline="eager"))


def test_an_out_of_memory_cross_has_the_colour_of_its_line(rows):
    (cross,) = [text for text in sweep(rows, **BY_CONTEXT).findobj(Text) if text.get_text() == "×"]
    assert to_hex(cross.get_color()).upper() == COLOR["eager"]
    assert cross.xy[0] == 1024


def test_no_data_lies_in_the_zone_of_out_of_memory(rows):
    (axes,) = sweep(rows, **BY_CONTEXT).axes
    zone = next(patch for patch in axes.patches if to_hex(patch.get_facecolor()).upper() == ZONE)
    (top,) = axes.transAxes.inverted().transform(axes.transData.transform([(512, rows["p80_ms"].max())]))
    assert top[1] < zone.get_y()


def test_only_out_of_memory_still_makes_a_plot(rows):
    lost = rows[rows["status"] == "oom"]
    assert "OOM" in texts(sweep(lost, **BY_CONTEXT))
    assert "OOM" in texts(grouped_bars(lost, **BY_CONTEXT, y="p50_ms"))
    assert "OOM" in texts(heatmap(lost, "implementation", "context_length"))


def test_cells_that_ran_out_of_memory_are_hatched(rows):
    patches = heatmap(rows, "implementation", "context_length").axes[0].patches
    assert [patch.get_hatch() for patch in patches].count("////") == 1


def test_a_cell_that_was_not_measured_is_a_dash(rows):
    assert "–" in texts(heatmap(rows.iloc[1:], "implementation", "context_length"))


def test_bars_carry_their_value_and_error(rows):
    chart = grouped_bars(rows, **BY_CONTEXT, y="p50_ms", error="p20_ms")
    assert {"1.00", "4.00", "0.500", "8.00"} <= set(texts(chart))
    assert len(chart.axes[0].containers) == 10  # five bars, five errors


def test_machines_look_the_same_everywhere(places):
    drawn = lines(sweep(places[places["implementation"] == "compiled"], **BY_CONTEXT))
    looks = {(line.get_linestyle(), to_hex(line.get_markerfacecolor()) == PAPER.lower()) for line in drawn}
    assert looks == {("-", False), ("--", False), ("--", True)}  # filled, dashed, hollow
    labels = texts(sweep(places, **BY_CONTEXT))
    assert {"H200 (reference)", "cpu-2 (this machine)", "RTX 5090, a report (published)"} <= set(labels)


def test_panels_share_their_limits_and_lose_no_line(rows):
    both = pd.concat([rows, rows.assign(d_head=128, p50_ms=10 * rows["p50_ms"])])
    for chart in (
        sweep(both, **BY_CONTEXT, facet="d_head", logy=False),
        ratio(both, **BY_CONTEXT, baseline="eager", facet="d_head"),
    ):
        first, second = chart.axes
        assert first.get_ylim() == second.get_ylim()
        assert [axes.get_title("left") for axes in chart.axes] == ["d = 64", "d = 128"]
        for line in lines(chart):
            assert max(line.get_ydata()) < first.get_ylim()[1]


def test_a_ratio_has_its_line_at_one(rows):
    chart = ratio(rows, **BY_CONTEXT, baseline="eager")
    assert [1, 1] in [list(line.get_ydata()) for line in chart.axes[0].get_lines()]
    assert "times faster than eager" in texts(chart)


def test_a_linear_axis_reaches_the_level_that_gives_it_its_meaning(rows):
    bottom, top = sweep(rows, **BY_CONTEXT, logy=False).axes[0].get_ylim()
    assert bottom == 0 < 8 < top
    faster = rows.assign(p50_ms=rows["p50_ms"].where(rows["implementation"] == "eager", 0.1))
    bottom, top = ratio(faster, **BY_CONTEXT, baseline="eager").axes[0].get_ylim()
    assert 0 <= bottom < 1 < 40 < top


def test_a_ratio_of_mixed_rows_is_refused(rows):
    mixed = rows.assign(batch_size=rows["implementation"].map({"eager": 8, "compiled": 4}))
    with pytest.raises(ValueError, match="differ in batch_size"):
        ratio(mixed, **BY_CONTEXT, baseline="eager")


def test_rows_in_one_place_are_refused(rows):
    both = pd.concat([rows, rows.assign(batch_size=4)])
    for plot in (sweep, grouped_bars):
        with pytest.raises(ValueError, match="differ in batch_size"):
            plot(both, y="p50_ms", **BY_CONTEXT)
    with pytest.raises(ValueError, match="differ in batch_size"):
        heatmap(both, "implementation", "context_length")


def test_names_stand_along_the_axis_in_their_order():
    rows = pd.DataFrame({"model_size": ["xl", "small", "medium"], "p50_ms": [3.0, 1.0, 2.0]})
    chart = sweep(rows, "model_size")
    chart.draw_without_rendering()
    assert [label.get_text() for label in chart.axes[0].get_xticklabels()] == ["small", "medium", "xl"]
    assert lines(chart)[0].get_ydata().tolist() == [1.0, 2.0, 3.0]


def test_empty_rows_say_what_to_run(rows):
    assert any("python -m cs336_systems run" in text for text in texts(every_kind(rows)["empty"]))
    for chart in (
        grouped_bars(rows.iloc[:0], "model_size", empty="no rows yet: ask"),
        heatmap(rows.iloc[:0], "model_size", "pass", empty="no rows yet: ask"),
        ratio(rows.iloc[:0], "model_size", "pass", baseline="forward", empty="no rows yet: ask"),
        ratio(rows.iloc[:3], **BY_CONTEXT, baseline="eager", empty="no rows yet: ask"),
        trace(rows.iloc[:0], empty="no rows yet: ask"),
    ):
        assert "no rows yet: ask" in texts(chart)


def test_styles_do_not_leak(rows):
    before = dict(plt.rcParams)
    every_kind(rows)["sweep"].svg()
    assert dict(plt.rcParams) == before


@given(st.lists(st.floats(0, 500), min_size=1, max_size=8).map(sorted))
def test_labels_are_moved_apart_and_keep_their_order(places):
    moved = spread(places, 13.0)
    assert np.all(np.diff(moved) >= 13.0 - 1e-6)
    assert np.mean(moved) == pytest.approx(np.mean(places), abs=1e-6)
    if np.all(np.diff(places) >= 13.0):
        assert moved == pytest.approx(places)


def test_tiny_numbers_are_powers_of_ten_and_others_plain():
    def labels(*errors):
        figure = sweep(pd.DataFrame({"step": [1, 2], "error": errors}), "step", "error", band=None)
        figure.canvas.draw()
        return [tick.get_text() for tick in figure.axes[0].get_yticklabels()]

    assert all("10^" in label for label in labels(1e-7, 1e-2))
    assert not any("^" in label or "e" in label for label in labels(1e-3, 10))


def test_long_names_of_bars_go_on_two_lines(rows):
    few = rows[rows["status"] == "ok"].head(1)
    models = pd.concat([few.assign(model=f"model {number} (2025)") for number in range(12)])
    for frame, ends in ((models.head(1), "0 (2025)"), (models, "0\n(2025)")):
        figure = grouped_bars(frame, "model", "p50_ms", "implementation")
        assert figure.axes[0].get_xticklabels()[0].get_text() == f"model {ends}"
