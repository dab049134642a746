"""The map says what the notebooks and rows say."""

import base64
import io

import nbformat
import pandas as pd
import pytest
from nbformat import v4
from PIL import Image

from labbook import lines
from labbook.book import map as overview
from labbook.book import notebooks

NAME = "13_mixed_precision_accumulation"
TITLE = """\
# 13 · Adding up

*Handout problem `mixed_precision_accumulation`, Spring 2025 and Spring 2026.*
*Read before:* [11](11_benchmarking_script.ipynb) and [12](12_nsys_profile.ipynb). *Time:* 5 minutes to
read, 15 to work.

**The question.** Add 0.01 to a running total. Which of
the four sums is far off? Why?

**You will be able to** say more.
"""
FIGURE = 'figure = lines()\npage.figure(\n    figure, "name"\n)'
POINTS = pd.DataFrame({"x": [1, 2], "y": [1, 2], "implementation": "plain"})
PNG = lines(POINTS, "x", "y", "implementation").png


def code(source, *outputs, tagged=False):
    metadata = {"tags": ["headline"]} if tagged else {}
    return v4.new_code_cell(source, outputs=list(outputs), metadata=metadata)


def answered(text, tagged=True):
    return code(
        "answer(...)", v4.new_output("display_data", {"text/markdown": text}), tagged=tagged
    )


def drawn(alt, source=FIGURE, tagged=False):
    data = {"image/png": base64.b64encode(PNG).decode()}
    metadata = {"image/png": {"alt": alt}}
    return code(source, v4.new_output("display_data", data, metadata=metadata), tagged=tagged)


@pytest.fixture
def entry_of(tmp_path, monkeypatch):
    """What the map tells of a notebook with these code cells."""
    monkeypatch.setattr(notebooks, "folder", lambda: tmp_path / "notebooks")
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path / "figures"))
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "book.yaml").write_text("chapters: {11: Profiling, 13: Numbers}")

    def entry_of(*cells) -> overview.Entry:
        notebook = v4.new_notebook(cells=[v4.new_markdown_cell(TITLE)] + list(cells))
        nbformat.write(notebook, notebooks.folder() / f"{NAME}.ipynb")
        (entry,) = overview.read_map().values()
        return entry

    return entry_of


def test_what_the_first_cell_says_and_the_tagged_answer_without_its_letter(entry_of):
    other = answered("**(1)** Not this.", tagged=False)
    entry = entry_of(other, answered("**(2)** It **is** (far) off.\n\n<details>\n✓</details>"))
    assert entry.question == "Add 0.01 to a running total. Which of the four sums is far off? Why?"
    assert (entry.read_before, entry.minutes) == (["11", "12"], ["5", "15"])
    assert entry.editions == ["2025", "2026"]
    assert entry.headline == "It **is** (far) off."
    assert entry_of(other).headline == entry_of(code("answer(...)", tagged=True)).headline == ""


def test_the_picture_is_the_tagged_one_or_the_first_of_the_reference(entry_of):
    here = "page.figure(f, here=True)"
    others = [drawn("mine", here), drawn("a sketch", "f")]
    first = drawn("first")
    marked = drawn("second", here, tagged=True)
    for cell, alt in ((marked, "second"), (drawn("third"), "first")):
        picture = entry_of(*others, first, cell, answered("**(1)** Yes.")).picture
        assert picture.metadata["image/png"]["alt"] == alt
    assert entry_of(*others).picture is None


def test_the_main_question():
    asked = "Which of the sums is off?"
    assert overview.main_question(f"Add numbers. {asked} Why?") == asked
    assert overview.main_question(f"(a) {asked} (b) Why?") == asked


def test_the_map_has_a_line_for_each_notebook(entry_of):
    *_, chapter, line = overview.map_table({NAME: entry_of()}).splitlines()
    assert chapter.startswith("| **Numbers** |")
    told = "both | Which of the four sums is far off? |  | 5, 15"
    assert line == f"| [13 · Adding up]({NAME}.ipynb) | {told} |"


def test_other_notebooks_in_the_folder_are_no_part_of_the_workbook(entry_of):
    (notebooks.folder() / "Untitled.ipynb").write_text("{")
    assert entry_of().name == NAME
    assert list(notebooks.load_notebooks()) == [NAME]


def test_a_headline_is_shown_with_a_small_picture_or_without(entry_of, shown):
    overview.show_headline(entry_of(answered("**(1)** Yes.")))
    assert [each.data for each in shown][1:] == ["Yes."]
    shown.clear()
    overview.show_headline(entry_of(drawn("a plot"), answered("**(1)** Yes.")))
    question, picture, headline = shown
    assert "13 · Adding up" in question.data
    assert headline.data == "Yes."
    assert Image.open(io.BytesIO(picture["image/png"])).width < Image.open(io.BytesIO(PNG)).width


def test_a_page_says_in_short_what_its_headline_says_once():
    title = v4.new_markdown_cell(TITLE)
    cells = [title, drawn("a plot"), answered("**(1)** It is 3.5 s. More follows.")]
    notebook = v4.new_notebook(cells=cells)
    for _ in range(2):
        overview.put_in_short(notebook, NAME)
        first, in_short, *rest = notebook.cells
        assert (first, rest) == (title, cells[1:])
        assert in_short.source == "**In short.** It is 3.5 s.\n\n![a plot](attachment:in-short.png)"
        assert in_short.attachments["in-short.png"]["image/png"]
