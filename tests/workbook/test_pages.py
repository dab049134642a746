"""Pages read offline: MathJax lies beside them and nothing else is loaded."""

import re

import nbformat
import pytest
from nbformat import v4

from cs336_systems.workbook import pages


@pytest.fixture
def page(tmp_path, write_notebook):
    return pages.render(write_notebook(tmp_path / "01_a.ipynb", "print(1)"))


def test_every_script_is_there(page):
    scripts = re.findall(r'<script src="([^"]+)"', page.read_text())
    local = [script for script in scripts if not script.startswith("data:")]
    assert local
    for script in local:
        address, _, config = script.partition("?config=")
        assert (page.parent / address).is_file()
        for name in config.split(","):
            assert (page.parent / "mathjax" / "config" / f"{name}.js").is_file()


def test_the_fonts_that_mathjax_is_told_to_use_are_there(page):
    (font,) = re.findall(r'webFont: "(.*?)"', pages._MATHJAX_CONFIG)
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


def test_a_link_to_a_notebook_leads_to_its_page(tmp_path):
    links = "[02](02_other.ipynb) and [elsewhere](https://example.org/02_other.ipynb)"
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell(links)])
    nbformat.write(notebook, tmp_path / "01_a.ipynb")
    text = pages.render(tmp_path / "01_a.ipynb").read_text()
    assert 'href="02_other.html"' in text
    assert 'href="https://example.org/02_other.ipynb"' in text


def test_the_index_escapes_links_and_marks_failures(tmp_path):
    path = tmp_path / "index.html"
    rows = [("a.html", ("a", "x=<1>", "ok", "1.0")), (None, ("b", "", "error", ""))]
    pages.write_index(path, "Runs & more", "one line", ("notebook", "parameters", "status", "seconds"), rows)
    text = path.read_text()
    assert '<a href="a.html">a</a>' in text
    assert "x=&lt;1&gt;" in text
    assert "Runs &amp; more" in text
    assert '<td class="error">error</td>' in text
    assert '<td class="number">1.0</td>' in text
