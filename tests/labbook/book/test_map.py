"""The map says what the notebooks and rows say, and the committed README and notebooks agree with it."""

import io

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat import v4
from PIL import Image

from labbook import lines
from labbook.book import batch
from labbook.book import map as overview
from labbook.book.problems import PROBLEMS
from labbook.labels import vocabulary
from labbook.rows import save_rows
from labbook.style import COLORS

REPOSITORY = batch.NOTEBOOKS.parent
NAME = "13_mixed_precision_accumulation"
TITLE = """\
# 13 · mixed_precision_accumulation

*Handout problem `mixed_precision_accumulation`, Spring 2025 and Spring 2026.*
*Read before:* [11](11_benchmarking_script.ipynb) and [12](12_nsys_profile.ipynb). *Time:* 5 minutes to
read, 15 to work.

**The question.** Add 0.01 to a running total. Which of
the four sums is far off? Why?

**You will be able to** say more.
"""
FIRST, SECOND = 'page.figure(figure, "first")', 'figure = lines()\npage.figure(\n    figure, "second"\n)'


def code(source, *outputs, tagged=False):
    metadata = {"tags": ["headline"]} if tagged else {}
    return v4.new_code_cell(source, outputs=list(outputs), metadata=metadata)


def answered(text, tagged=True):
    return code("answer(...)", v4.new_output("display_data", {"text/markdown": text}), tagged=tagged)


@pytest.fixture
def entry_of(tmp_path, monkeypatch):
    """What the map tells of a notebook with these code cells."""

    def entry_of(*cells) -> overview.Entry:
        monkeypatch.setattr(batch, "NOTEBOOKS", tmp_path / "notebooks")
        batch.NOTEBOOKS.mkdir(exist_ok=True)
        notebook = v4.new_notebook(cells=[v4.new_markdown_cell(TITLE), *cells])
        nbformat.write(notebook, batch.NOTEBOOKS / f"{NAME}.ipynb")
        (entry,) = overview.read_map().values()
        return entry

    return entry_of


@pytest.fixture
def figures(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path / "figures"))
    return tmp_path / "figures"


@pytest.fixture
def displayed(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda what, **_: shown.append(what))
    return shown


def test_what_the_first_cell_says(entry_of):
    entry = entry_of()
    assert entry.problem.number == 13
    assert entry.question == "Add 0.01 to a running total. Which of the four sums is far off? Why?"
    assert (entry.read_before, entry.minutes) == ((11, 12), (5, 15))


def test_the_headline_is_the_tagged_answer_without_its_letter(entry_of):
    other = answered("**(1)** Not this.", tagged=False)
    entry = entry_of(other, answered("**(2)** The float16 sum **is** (far) off.\n\n<details>\n✓</details>"))
    assert entry.headline == "The float16 sum **is** (far) off."
    assert entry_of(other).headline == ""
    assert entry_of(code("answer(...)", tagged=True)).headline == ""


def test_the_figure_is_the_tagged_one_or_the_first_of_the_reference(entry_of):
    here = code('page.figure(figure, "mine", here=True)')
    assert entry_of(here, code(FIRST), code(SECOND, tagged=True), answered("**(1)** Yes.")).figure == "second"
    assert entry_of(here, code(FIRST), code(SECOND), answered("**(1)** Yes.")).figure == "first"
    assert entry_of(here).figure == ""


def test_a_question_in_short():
    assert overview.in_short("Add numbers. Which of the sums is off? Why?") == "Which of the sums is off?"
    assert overview.in_short("Add 0.01 twice. Why?") == "Add 0.01 twice."
    assert overview.in_short("Which of the sums is off? (a) All. (b) Why?") == "Which of the sums is off?"
    assert overview.in_short("(a) Which of the sums is off? (b) Why?") == "Which of the sums is off?"


def test_the_map_has_every_problem_once_with_its_rows(entry_of, figures):
    for n in (1, 2):
        save_rows([{"accumulation": str(n), "steps": n, "total": 1.0}], "fsdp", "accumulation", machine="m")
    (figures / "m" / "fsdp" / "accumulation-old.csv").write_text("moved, away\n")
    table = overview.map_table({NAME: entry_of()}, machine="m").replace("<wbr>", "").splitlines()
    line = f"| [13 · {NAME[3:]}]({NAME}.ipynb) | both | Which of the four sums is far off? |  | 5, 15 | – |"
    assert line in table
    assert "| 43 · fsdp | 2026 | *not yet* |  |  | 2 |" in table
    assert sum(f"| {problem.title} |" in line for problem in PROBLEMS for line in table) == len(PROBLEMS) - 1
    assert len({line.count("|") for line in table}) == 1


def test_a_headline_is_shown_with_a_small_picture_or_without(entry_of, figures, displayed):
    entry = entry_of(code(FIRST), answered("**(1)** Yes."))
    overview.show_headline(entry, "m")
    assert [shown.data for shown in displayed][1:] == ["Yes."]
    displayed.clear()
    (figures / "m" / NAME[3:]).mkdir(parents=True)
    Image.new("RGB", (1472, 736), "white").save(figures / "m" / NAME[3:] / "first.png")
    overview.show_headline(entry, "m")
    question, picture, headline = displayed
    assert "13 · mixed" in question.data
    assert Image.open(io.BytesIO(picture["image/png"])).width < 1000
    assert headline.data == "Yes."


def test_a_small_picture_keeps_the_colours_of_thin_lines(tmp_path):
    attention = vocabulary().families["attention"][0]
    names = list(attention)[:6]
    points = [{"x": x, "y": x * n, "implementation": name} for n, name in enumerate(names, 1) for x in (1, 2)]
    (tmp_path / "six.png").write_bytes(lines(pd.DataFrame(points), "x", "y", "implementation").png())
    small = Image.open(io.BytesIO(overview._small(tmp_path / "six.png"))).convert("RGB")
    for color in (COLORS[attention[name].color] for name in names):
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert np.abs(np.asarray(small).astype(int) - wanted).sum(axis=-1).min() < 18  # of 765


def test_rows_and_tables_are_shown(displayed):
    overview.show_tables()
    row = overview.load_rows("benchmarking_script", "h200", "model_times").iloc[0]
    overview.show_row(row, "model_times")
    of_tables, of_row = (shown["text/html"] for shown in displayed)
    assert "attention_times" in of_tables
    assert f"{row['p50_ms']:g}" in of_row
    assert "provenance" in of_row
    assert ">torch<" in of_row, "the column's own name, not the label of an implementation"


def test_the_map_of_a_readme_is_replaced_and_nothing_else(entry_of, tmp_path):
    entry_of()
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n\n<!-- map, here -->\nold\n<!-- end of map -->\n\nMore.\n")
    overview.renew_map()
    renewed = readme.read_text()
    assert f"notebooks/{NAME}.ipynb" in renewed
    assert "old" not in renewed
    assert renewed.startswith("# Title\n\n<!-- map, here -->\n")
    assert renewed.endswith("<!-- end of map -->\n\nMore.\n")
    overview.renew_map()
    assert readme.read_text() == renewed


def test_the_readme_is_current():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert "<!-- end of map -->" in readme
    assert overview.with_map(readme, overview.read_map()) == readme, "make notebooks renews the README's map"


@pytest.mark.parametrize("entry", overview.read_map().values(), ids=lambda entry: entry.problem.name)
def test_a_notebook_tells_its_question_time_and_headline(entry):
    assert "?" in entry.question
    assert len(entry.minutes) == 2
    assert set(entry.read_before) <= {0, *(problem.number for problem in PROBLEMS)} - {entry.problem.number}
    assert entry.headline
