"""The map says what the notebooks and rows say, and the committed README and notebooks agree with it."""

import io

import nbformat
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from nbformat import v4
from PIL import Image

from cs336_systems.measure.machine import load_card
from cs336_systems.measure.rows import save_rows
from cs336_systems.measure.schema import COLUMNS
from cs336_systems.report import plots
from cs336_systems.workbook import map as overview
from cs336_systems.workbook.map import Page
from cs336_systems.workbook.problems import PROBLEMS

REPOSITORY = overview.NOTEBOOKS.parent
TITLE = """\
# 13 · mixed_precision_accumulation

*Handout problem `mixed_precision_accumulation`, Spring 2025 and Spring 2026.*

**The question.** Add 0.01 to a running total. Which of
the four sums is far off? Why?

**You will be able to** say more.
"""
FIRST, SECOND = (
    'save(figure, slug, "first", reference)',
    'plots.save(\n    figure, slug, "second", reference\n)',
)


def code(source, *outputs, tagged=False, count=1):
    metadata = {"tags": ["headline"]} if tagged else {}
    return v4.new_code_cell(source, outputs=list(outputs), metadata=metadata, execution_count=count)


def answered(text, tagged=True):
    return code("answer(...)", v4.new_output("display_data", {"text/markdown": text}), tagged=tagged)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    return folder


@pytest.fixture
def page_of(folder):
    """The page of a notebook with these code cells."""

    def page_of(*cells) -> Page:
        notebook = v4.new_notebook(cells=[v4.new_markdown_cell(TITLE), *cells])
        nbformat.write(notebook, folder / "13_mixed_precision_accumulation.ipynb")
        (page,) = overview.read_pages(folder).values()
        return page

    return page_of


@pytest.fixture
def figures(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path / "figures"))
    return tmp_path / "figures"


@pytest.fixture
def displayed(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda what, **_: shown.append(what))
    return shown


def test_what_the_first_cell_says(page_of):
    page = page_of()
    assert page.problem.number == 13
    assert page.editions == (2025, 2026)
    assert page.question == "Add 0.01 to a running total. Which of the four sums is far off? Why?"
    assert page.link == "[13 · mixed_precision_accumulation](13_mixed_precision_accumulation.ipynb)"


def test_the_headline_is_the_tagged_answer_without_its_letter(page_of):
    other = answered("**(1)** Not this.", tagged=False)
    assert page_of(other, answered("**(2)** The float16 sum **is** (far) off.")).headline == (
        "The float16 sum **is** (far) off."
    )
    assert page_of(other).headline == ""
    assert page_of(code("answer(...)", tagged=True, count=None)).headline == ""


def test_the_figure_is_the_tagged_one_or_the_first(page_of):
    assert page_of(code(FIRST), code(SECOND, tagged=True), answered("**(1)** Yes.")).figure == "second"
    assert page_of(code(FIRST), code(SECOND), answered("**(1)** Yes.")).figure == "first"
    assert page_of(code('save(figure, slug, "here", card.slug)')).figure == ""


def test_executed_means_every_cell(page_of):
    assert page_of(code("a = 1"), code("b = 2", count=2)).executed
    assert not page_of(code("a = 1"), code("b = 2", count=None)).executed


def test_what_is_no_notebook_is_named(folder):
    (folder / "13_mixed_precision_accumulation.ipynb").write_text("{")
    with pytest.raises(ValueError, match=r"13_mixed_precision_accumulation\.ipynb cannot be read"):
        overview.read_pages(folder)


@pytest.mark.parametrize(
    ("question", "short"),
    [
        ("Add numbers. Which of the sums is off? Why?", "Which of the sums is off?"),
        ("Add 0.01 twice. Why?", "Add 0.01 twice."),
        ("`torch.compile` compiles. How much faster is it?", "How much faster is it?"),
        ("", ""),
    ],
)
def test_a_question_in_short(question, short):
    assert overview.in_short(question) == short


def test_the_map_has_every_problem_once_with_its_rows(page_of, figures):
    for table in ("rows", "cold"):
        save_rows(
            [{"case": "a", "result": 1.0}, {"case": "b", "result": 2.0}], "fsdp", machine="m", table=table
        )
    page = page_of()
    lines = overview.map_table({page.problem.name: page}, "m").replace("<wbr>", "").splitlines()
    link, title = page.link, "43 · fsdp"
    assert f"| {link} | both | Which of the four sums is far off? | – |" in lines
    assert f"| {title} | 2026 | *not yet* | 4 |" in lines
    page = page_of(code("a = 1", count=None))
    assert "off? *(not executed yet)* | – |" in overview.map_table({page.problem.name: page}, "m")
    assert sum(f"| {problem.title} |" in line for problem in PROBLEMS for line in lines) == len(PROBLEMS) - 1


def test_a_headline_is_shown_with_a_small_picture(page_of, figures, displayed):
    folder = figures / "m" / "mixed_precision_accumulation"
    folder.mkdir(parents=True)
    Image.new("RGB", (1472, 736), "white").save(folder / "first.png")
    overview.show_headline(page_of(code(FIRST), answered("**(1)** Yes.")), "m")
    question, picture, headline = displayed
    assert question.data.startswith("### [13 · mixed")
    assert Image.open(io.BytesIO(picture["image/png"])).size == (800, 400)
    assert headline.data == "Yes."


def test_a_small_picture_keeps_the_colours_of_its_lines(tmp_path):
    lines = [f"line {number}" for number in range(6)]
    points = pd.DataFrame(
        [{"x": x, "y": x * (n + 1), "hue": hue} for n, hue in enumerate(lines) for x in (1, 2, 3)]
    )
    chart = plots.sweep(points, "x", "y", "hue", title="Six lines")
    (tmp_path / "six.png").write_bytes(chart.png())
    small = np.asarray(Image.open(io.BytesIO(overview._small(tmp_path / "six.png"))).convert("RGB")).astype(
        int
    )
    for line in chart.axes[0].lines[:6]:
        color = np.round(255 * np.array(to_rgb(line.get_color())))
        assert np.abs(small - color).sum(axis=-1).min() < 18  # of 765


def test_a_headline_without_its_picture_and_a_notebook_without_headline(page_of, figures, displayed):
    overview.show_headline(page_of(code(FIRST), answered("**(1)** Yes.")), "nowhere")
    assert [shown.data for shown in displayed][1:] == ["Yes."]
    displayed.clear()
    overview.show_headline(page_of(code(FIRST)), "nowhere")
    assert displayed == []


def test_a_row_is_read_column_by_column():
    row = pd.Series(
        {"pass": "forward", "context_length": 128.0, "p50_ms": 1.5, "case": None, "machine": "h200"}
    )
    table = overview.row_read(row)
    assert table.frame["in this row"].tolist() == ["forward", "128", "1.5", "h200"]
    assert table.frame["unit"].tolist() == ["", "", "ms", ""]
    assert table.frame.index.tolist()[-1] == ("provenance", "machine")


def test_the_vocabulary_is_whole_and_folded():
    table = overview.vocabulary()
    assert table.frame.index.get_level_values("column").tolist() == list(COLUMNS)
    assert table._repr_html_().startswith(f"<details><summary>All {len(COLUMNS)} columns</summary>")


def test_the_card_as_a_table():
    card = load_card("h200")
    texts = overview.card_table(card).frame["h200"]
    assert "NVIDIA H200" in texts["GPU"]
    assert texts["matrix products, bfloat16"] == f"{card.matmul_tflops['bfloat16']:.0f} TFLOP/s, measured"


README = "# Title\n\n<!-- map, here -->\nold\n<!-- end of map -->\n\nMore.\n"


def test_the_map_of_a_readme_is_replaced_and_nothing_else(page_of, folder):
    page = page_of()
    (folder.parent / "README.md").write_text(README)
    overview.renew_map(folder)
    renewed = (folder.parent / "README.md").read_text()
    assert "notebooks/13_mixed_precision_accumulation.ipynb" in renewed
    assert "old" not in renewed
    assert renewed.startswith("# Title\n\n<!-- map, here -->\n")
    assert renewed.endswith("<!-- end of map -->\n\nMore.\n")
    assert overview.with_map(renewed, {page.problem.name: page}) == renewed


def test_the_readme_is_current():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert "<!-- end of map -->" in readme
    assert overview.with_map(readme, overview.read_pages()) == readme, (
        "make notebooks renews the README's map"
    )


@pytest.mark.parametrize("page", overview.read_pages().values(), ids=lambda page: page.problem.name)
def test_a_notebook_tells_its_editions_and_question(page):
    assert page.editions == page.problem.editions
    assert "?" in page.question
