"""The site: what it needs, what it refuses, and that pages, rows and links are there."""

import base64
import io
import re
import resource
import shutil

import nbformat
import pytest
from nbformat import v4
from PIL import Image

from labbook.book import site
from labbook.book.execution import Outcome
from labbook.book.notebooks import BatchError
from labbook.files import write_record


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A workbook of two notebooks, behind which rows stand."""
    monkeypatch.setenv("LABBOOK_PROJECT", str(tmp_path))
    for name in ("notebooks", "figures/m/one", "figures/m/two"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "notebooks" / "book.yaml").write_text(
        "chapters: {11: Profiling}\nquestions: {Profiling: Where}"
    )
    for name in ("m/one/times", "m/two/steps"):
        (tmp_path / "figures" / f"{name}.csv").write_text("p50_ms\n1\n")
    answer = "[11](11_one.ipynb) takes $b^2$\n\n| a |\n|--:|\n| 1 |"
    linked = v4.new_output("display_data", {"text/markdown": answer})
    for name in ("11_one", "12_two"):
        cells = [v4.new_markdown_cell(f"# {name}"), v4.new_code_cell("1", outputs=[linked])]
        nbformat.write(v4.new_notebook(cells=cells), tmp_path / "notebooks" / f"{name}.ipynb")
    return tmp_path


def test_what_is_not_installed_or_not_executed_is_said(folder, monkeypatch):
    monkeypatch.setattr(site, "find_spec", lambda name: None)
    with pytest.raises(BatchError, match=r"pip install -e '.\[site\]'"):
        site.build(folder / "site", folder / "notebooks")
    monkeypatch.setattr(site, "find_spec", lambda name: name)
    with pytest.raises(BatchError, match=r"there is no executed notebook in .*figures"):
        site.build(folder / "site", folder / "figures")


@pytest.fixture
def sphinx():
    for name in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(name, reason="the extra `site` is not installed")


@pytest.fixture
def run(folder):
    """A run: 11 ended well, with a parameter; 12 did not."""
    there = folder / "runs" / "m"
    there.mkdir(parents=True)
    outcomes = {
        "11_one-3": Outcome("ok", "", 1.0, "11_one", "steps=3"),
        "12_two": Outcome("error", "cell [1]: Bad: <luck>", 1.0, "12_two", "steps=3"),
    }
    for name, outcome in outcomes.items():
        notebook = nbformat.read(folder / f"notebooks/{outcome.notebook}.ipynb", 4)
        notebook.cells[0].source += """\n
$a^2$, [11](11_one.ipynb), [13](13_three.ipynb), [there](../lib/x.py)"""
        notebook.cells.insert(0, v4.new_markdown_cell("failed"))
        nbformat.write(notebook, there / f"{name}.ipynb")
        write_record(there / f"{name}.json", outcome)
    (there / "14_torn.ipynb").write_text("{")
    nbformat.write(v4.new_notebook(), there / "15_strange.ipynb")
    return lambda: site.build(there, there), there


def test_a_run_has_a_site_that_stays_when_the_next_cannot_be_built(
    run, sphinx, capsys, monkeypatch
):
    """Its first page says how each ended; links lead somewhere; nothing is left beside it."""
    build, there = run
    first = build()
    text = first.read_text()
    assert re.search(r"error +1.0 s  12_two steps=3\n +cell \[1\]: Bad: &lt;luck&gt;", text)
    assert re.search("14_.* not appear .*\n.* no first cell '# 15", capsys.readouterr().err)
    assert len(list(there.glob("*.ipynb"))) == 4
    assert [path.name for path in there.parent.iterdir()] == ["m"], (
        "myst-nb writes beside its pages"
    )
    for page in sorted(there.glob("*.html")):
        links = r'(?:href|src)="(?!https?:|data:|mailto:)([^"]*)"'
        for link in re.findall(links, page.read_text()):
            name, _, place = link.partition("#")
            linked = there / (name.partition("?")[0] or page.name)
            assert linked.exists(), (page.name, link)
            if place and linked.suffix == ".html":
                assert f'id="{place}"' in linked.read_text(), link
    second = (there / "12_two.html").read_text()
    assert 'href="11_one-3.html"><span class="std std-doc">11</span></a>, 13, there' in second
    assert "No plot" in (there / "gallery.html").read_text()
    monkeypatch.setattr(site, "_CONFIG", "1 / 0")
    with pytest.raises(BatchError, match="ZeroDivisionError"):
        build()
    assert first.read_text() == text


@pytest.fixture
def browser():
    """A headless one; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = list(filter(None, map(shutil.which, names)))
    if not found:
        pytest.skip("no Chromium on the PATH")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # it reserves addresses by the terabyte
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("width", [1400, 390])
def test_a_browser_has_nothing_to_complain_of_at_a_desk_or_on_a_phone(run, sphinx, browser, width):
    pages = sorted(run[0]().parent.glob("*.html"))
    there = pages[0].parent
    said = []
    page = browser.new_page(viewport={"width": width, "height": 900})
    for event in ("console", "pageerror", "requestfailed"):
        page.on(event, lambda what: said.append(what))
    page.goto((there / "12_two.html").as_uri())
    page.wait_for_selector(".MathJax .mi")
    for each in pages:
        page.goto(each.as_uri())
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, each.name
    page.goto((there / "search.html").as_uri() + "?q=takes")
    page.get_by_role("link", name="12_two").last.click()
    page.wait_for_load_state("networkidle")
    assert page.url.partition("?")[0].endswith("12_two.html")
    assert said == []


def test_pages_have_their_rows_the_first_a_card_a_chapter_and_the_gallery_each_plot_of_committed_rows(
    folder, sphinx
):
    name = folder / "notebooks" / "11_one.ipynb"
    notebook = nbformat.read(name, 4)
    png = io.BytesIO()
    Image.new("L", (40, 20)).save(png, "png")
    data = {"image/png": base64.b64encode(png.getvalue()).decode()}
    for title, source in (("a < b", "page.figure(f, 's')"), ("mine", "page.figure(f, here=True)")):
        output = v4.new_output("display_data", data, metadata={"image/png": {"alt": title}})
        notebook.cells.append(v4.new_code_cell(source, outputs=[output]))
    notebook.cells[0].source += "\n\n*Time:* 6 minutes to read, 30 to work.\n\n## Predict"
    notebook.cells += [v4.new_code_cell("def f():\n    pass", metadata={"tags": ["aside"]})]
    nbformat.write(notebook, name)
    there = site.build(folder / "site", folder / "notebooks").parent
    first, gallery, page = (
        (there / f"{name}.html").read_text() for name in ("index", "gallery", "12_two")
    )
    assert "11_one.html" in first
    assert "```" not in first
    assert "0.1 hours to read, 0.5 to work" in first
    for text in (first, gallery):
        assert 'alt="a &lt; b"\nwidth="40" height="20"' in text
        assert "mine" not in text
    other = (there / "11_one.html").read_text()
    assert 'alt="mine"' in other
    assert "Code: f" in other
    assert re.search(r'="11_one\.html".*takes.*class="math.*</table>', page, re.DOTALL)
    (rows,) = re.findall(r'href="(rows/m/.*?)"', page)
    assert (there / rows).read_text() == "p50_ms\n1\n"
