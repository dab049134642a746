"""Pages read offline: MathJax lies beside them, nothing else is loaded; answers come without their code."""

import re
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest
from nbformat import v4

from labbook.book import pages
from labbook.book.tidy import HIDE_INPUT


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


def test_pages_of_several_notebooks_are_made_at_once(tmp_path, write_notebook):
    notebooks = [write_notebook(tmp_path / f"0{n}_a.ipynb", "print(1)") for n in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        assert all(page.exists() for page in pool.map(pages.render, notebooks))


def test_mathjax_is_copied_once_and_whole(page, write_notebook):
    marker = page.parent / "mathjax" / "marker"
    marker.touch()
    (page.parent / ".mathjax").mkdir()  # what a killed copy leaves
    pages.render(write_notebook(page.parent / "02_b.ipynb", "print(2)"))
    assert marker.exists()


def test_an_answers_input_is_folded_and_a_link_to_a_notebook_leads_to_its_page(tmp_path):
    outputs = [v4.new_output("stream", name="stdout", text="the answer")]
    hidden = v4.new_code_cell("a = 'its code'", metadata={"tags": [HIDE_INPUT]}, outputs=outputs)
    links = v4.new_markdown_cell("[02](02_other.ipynb) and [elsewhere](https://example.org/02_other.ipynb)")
    cells = [links, hidden, v4.new_code_cell("b = 'shown'")]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "01_a.ipynb")
    text = pages.render(tmp_path / "01_a.ipynb").read_text()
    (folded,) = re.findall(r"<details.*?</details>", text, re.DOTALL)
    assert "its code" in folded
    assert "the answer" in text.replace(folded, "")
    assert "shown" in text.replace(folded, "")
    assert 'href="02_other.html"' in text
    assert 'href="https://example.org/02_other.ipynb"' in text
