"""Pages read offline: MathJax lies beside them, nothing else is loaded; answers come without their code."""

import re

import nbformat
import pandas as pd
import pytest
from nbformat import v4

from cs336_systems.workbook import pages
from cs336_systems.workbook.tidy import HIDE_INPUT


@pytest.fixture
def page(tmp_path, write_notebook):
    return pages.render(write_notebook(tmp_path / "01_a.ipynb", "print(1)"))


def test_every_script_and_font_is_there(page):
    scripts = re.findall(r'<script src="([^"]+)"', page.read_text())
    local = [script for script in scripts if not script.startswith("data:")]
    assert local
    for script in local:
        address, _, config = script.partition("?config=")
        assert (page.parent / address).is_file()
        for name in config.split(","):
            assert (page.parent / "mathjax" / "config" / f"{name}.js").is_file()
    (font,) = re.findall(
        r'webFont: "(.*?)"', (page.parent / "mathjax" / "config" / "workbook.js").read_text()
    )
    assert list((page.parent / "mathjax" / "fonts" / "HTML-CSS" / font).rglob("*.woff"))


def test_mathjax_is_copied_once_and_whole(page, write_notebook):
    marker = page.parent / "mathjax" / "marker"
    marker.touch()
    (page.parent / ".mathjax").mkdir()  # what a killed copy leaves
    pages.render(write_notebook(page.parent / "02_b.ipynb", "print(2)"))
    assert marker.exists()


def test_without_the_package_the_page_still_comes(tmp_path, write_notebook, monkeypatch):
    monkeypatch.setattr(pages.importlib.util, "find_spec", lambda name: None)
    page = pages.render(write_notebook(tmp_path / "01_a.ipynb", "print(1)"))
    assert "print" in page.read_text()
    assert not (tmp_path / "mathjax").exists()


def test_the_input_of_an_answer_is_folded_and_its_output_is_not(tmp_path):
    outputs = [v4.new_output("stream", name="stdout", text="the answer")]
    hidden = v4.new_code_cell("a = 'its code'", metadata={"tags": [HIDE_INPUT]}, outputs=outputs)
    nbformat.write(v4.new_notebook(cells=[hidden, v4.new_code_cell("b = 'shown'")]), tmp_path / "01_a.ipynb")
    text = pages.render(tmp_path / "01_a.ipynb").read_text()
    (folded,) = re.findall(r"<details.*?</details>", text, re.DOTALL)
    assert "its code" in folded
    assert "the answer" not in folded
    assert "the answer" in text
    assert "shown" not in folded


def test_a_link_to_a_notebook_leads_to_its_page(tmp_path):
    links = "[02](02_other.ipynb) and [elsewhere](https://example.org/02_other.ipynb)"
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell(links)]), tmp_path / "01_a.ipynb")
    text = pages.render(tmp_path / "01_a.ipynb").read_text()
    assert 'href="02_other.html"' in text
    assert 'href="https://example.org/02_other.ipynb"' in text


def test_the_index_escapes_links_and_marks_failures(tmp_path):
    table = pd.DataFrame(
        {
            "notebook": ["a", "b"],
            "parameters": ["x=<1>", ""],
            "status": ["ok", "error"],
            "seconds": ["1.0", ""],
        }
    )
    pages.write_index(
        tmp_path / "index.html",
        "Runs & more",
        "one line",
        table.assign(page=["a.html", ""], failed=[False, True]),
    )
    text = (tmp_path / "index.html").read_text()
    for part in (
        '<a href="a.html">a</a>',
        "x=&lt;1&gt;",
        "Runs &amp; more",
        '<span class="error">error</span>',
    ):
        assert part in text
