"""The site: what it needs, what it refuses, and that pages, plots, rows and links are there."""

import base64

import nbformat
import pytest
from nbformat import v4

from labbook.book import notebooks, site
from labbook.book.notebooks import BatchError
from labbook.rows import load_rows

PNG = base64.b64encode(b"\x89PNG").decode()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A workbook of two notebooks, one with a plot that rows stand behind."""
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(site, "REPOSITORY_FIGURES", tmp_path / "figures")
    for name in ("notebooks", "figures/m/one"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "notebooks" / "book.yaml").write_text("chapters: {11: Profiling}")
    (tmp_path / "figures/m/one/times.csv").write_text("p50_ms\n1\n")
    title = {"image/png": {"alt": "It is fast"}}
    shown = v4.new_output("display_data", {"image/png": PNG}, metadata=title)
    linked = v4.new_output("display_data", {"text/markdown": "[11](11_one.ipynb)"})
    for name, output in (("11_one", shown), ("12_two", linked)):
        cells = [v4.new_markdown_cell(f"# {name}"), v4.new_code_cell("1", outputs=[output])]
        nbformat.write(v4.new_notebook(cells=cells), tmp_path / "notebooks" / f"{name}.ipynb")
    return tmp_path


def test_what_is_not_installed_or_not_executed_is_said(folder, monkeypatch):
    monkeypatch.setattr(site, "find_spec", lambda name: None if name == "furo" else name)
    with pytest.raises(BatchError, match=r"furo is not installed; `pip install -e '.\[site\]'`"):
        site.build(folder / "site")
    monkeypatch.setattr(site, "find_spec", lambda name: name)
    with pytest.raises(BatchError, match=r"there is no executed notebook in .*figures"):
        site.build(folder / "site", folder / "figures")
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell("1")]), folder / "notebooks" / "13_three.ipynb")
    with pytest.raises(BatchError, match=r"13_three.ipynb has no outputs"):
        site.build(folder / "site")


def test_pages_plots_and_rows(folder):
    for name in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(name, reason="`make site` installs it")
    first = site.build(folder / "site")
    assert "11_one.html" in first.read_text()
    assert 'href="11_one.html"' in (folder / "site" / "12_two.html").read_text()
    gallery = (folder / "site" / "gallery.html").read_text()
    assert "It is fast" in gallery
    assert 'href="11_one.html#11_one-1"' in gallery
    page = (folder / "site" / "11_one.html").read_text()
    assert 'id="11_one-1"' in page
    assert 'href="rows/m/one/times.csv"' in page
    assert (folder / "site" / "rows/m/one/times.csv").read_text() == "p50_ms\n1\n"


def test_machines_stand_beside_each_other_with_the_times_of_their_rows():
    *_, section = "".join(site._machines()).partition("[23](23_weighted_sum.ipynb), weighted_sum_times")
    for machine in ("h100", "h200"):
        rows = load_rows("weighted_sum", machine, "weighted_sum_times").query("implementation == 'eager'")
        assert len(rows) > 3
        assert all(f"<td>{ms:.3f}</td>" in section for ms in rows["p50_ms"])
