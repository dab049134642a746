"""Executed notebooks as a site that reads offline: chapters, search, a gallery of plots, their rows.

Sphinx builds it, with myst-nb and furo (`pip install -e '.[site]'`). Nothing is executed. The site of a run
lies beside its notebooks; its first page says how each ended.
"""

import base64
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import nbformat
import numpy as np
from PIL import Image

from labbook.book import batch, notebooks
from labbook.book import map as overview
from labbook.book.tidy import ASIDE, CHECKER, HIDE_INPUT, has_solution
from labbook.files import locked, make_folder
from labbook.project import project

_LINK = r"\[([^][]*)\]\((?:\.\./[^)]*|(?P<name>\d\d_\w+)\.ipynb(?P<at>#[^)]*)?)\)"
# The line after a page's card, of `release.provenance`.
_MEASURED = r'"(measured (?:at|on) [^"\\]+)'
_TITLE = "Making language models train fast, measured"
_CONFIG = f"""\
project = html_title = "{_TITLE}"
extensions = ["myst_nb"]
html_theme = "furo"
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "amsmath"]
mathjax_path = "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full,Safe,workbook"
myst_update_mathjax = False
mathjax2_config = {{"tex2jax": {{"processClass": "math"}}}}
html_static_path = ["static"]
html_extra_path = ["extra"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = html_copy_source = False
html_show_search_summary = False  # it is fetched, which browsers refuse to a page that is a file
"""
# jupyter_server_mathjax has STIX as its only font, which MathJax has to be told: left alone it waits for a
# font that is not there. And browsers refuse its blank font, about:blank, to a page that is a file.
_MATHJAX = """\
MathJax.Hub.Config({
  "HTML-CSS": {
    availableFonts: [], imageFont: null, preferredFont: null, webFont: "STIX-Web",
    styles: { "@font-face": { "font-family": "MathJax_Blank", src: "local('none')" } }
  },
  "fast-preview": { disabled: true },
  messageStyle: "none",
  showMathMenu: false
});
MathJax.Ajax.loadComplete("[MathJax]/config/workbook.js");
"""


class _Picture(NamedTuple):
    """A PNG of the site, what it shows, and its pixels."""

    place: str
    title: str
    width: int
    height: int

    def html(self) -> str:
        return f"""<img src="{self.place}" alt="{escape(self.title)}"
width="{self.width}" height="{self.height}" loading="lazy">"""


class _Page(NamedTuple):
    """What the map tells of a notebook, the page it is, and its plots of committed rows."""

    entry: overview.Entry
    pictures: list[_Picture]


def build(target: Path, executed: Path) -> Path:
    """Write the site of the executed notebooks of a folder into another, or, for a run's, into the same.

    Returns its first page.
    Raises BatchError: Sphinx is not installed, or could not build.
    """
    if not find_spec("furo"):
        raise notebooks.BatchError(
            "the site needs more packages: `pip install -e '.[site]'` installs them"
        )
    if not notebooks.paths(executed):
        raise notebooks.BatchError(
            f"there is no executed notebook in {executed}; `make run` makes some"
        )
    with locked(target), tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        _write_source(source, executed)
        built = Path(scratch, "built")
        _run_sphinx(source, built, Path(scratch, "trees"))
        shutil.copytree(built, target, dirs_exist_ok=True)
    return target / "index.html"


def _write_source(source, executed):
    """What Sphinx reads: the pages, and what they are shown with.

    The first page says how the notebooks of a run ended, or what the workbook is, with a card a chapter.
    """
    (source / "extra" / "pictures").mkdir(parents=True)
    is_run = not executed.samefile(notebooks.folder())
    pages = list(_write_pages(source, executed, is_run))
    if is_run:
        first = _page_of_run(executed)
    else:
        first = f"# {_TITLE}\n\n{notebooks.book('about') or ''}\n\n{_cards(pages)}\n\n"
    mathjax = Path(find_spec("jupyter_server_mathjax").origin).parent / "static"
    shutil.copytree(mathjax, source / "static" / "mathjax")
    shutil.copy(Path(__file__).with_name("site.css"), source / "static")
    texts = {
        "index.md": first + _contents(pages),
        "gallery.md": _gallery(pages),
        "conf.py": _CONFIG,
        "static/mathjax/config/workbook.js": _MATHJAX,
    }
    for name, text in texts.items():
        (source / name).write_text(text, encoding="utf-8")


def _write_pages(source, executed, is_run):
    paths = notebooks.paths(executed)
    # What a link names leads to the first of several pages of one notebook: the last entry stays.
    names = {path.stem.partition("-")[0]: path.stem for path in reversed(paths)}
    for path in paths:
        try:
            yield _write_page(path, source, names, is_run)
        except Exception as error:  # a stranger's, or whatever a killed run left
            print(f"warning: {path.name} is left out: {error}", file=sys.stderr)


def _page_of_run(executed):
    """How each notebook ended."""
    outcomes = map(batch.load_outcome, sorted(executed.glob("*.json")))
    summary = batch.summary(list(filter(None, outcomes))) or "No notebook has ended."
    return f"# The workbook on {executed.name}\n\n~~~~text\n{summary}\n~~~~\n"


def _cards(pages):
    """Of each chapter its name, hours, first picture, and what it asks."""
    questions = notebooks.book("questions")
    cards = []
    for chapter, of_chapter in _by_chapter(pages):
        if chapter not in questions:
            continue
        minutes = [page.entry.minutes or (0, 0) for page in of_chapter]
        read, work = np.array(minutes, float).sum(axis=0) / 60
        picture = next((page.pictures[0].html() for page in of_chapter if page.pictures), "")
        cards.append(f"""<a href="{of_chapter[0].entry.name}.html"><b>{escape(chapter)}</b>
<span>{read:.1f} hours to read, {work:.1f} to work</span>
{picture}<span>{escape(questions[chapter])}</span></a>""")
    return f'<div class="grid">{"".join(cards)}</div>'


def _gallery(pages):
    """Every plot of committed rows, by chapter."""
    text = ""
    for chapter, of_chapter in _by_chapter(pages):
        links = [
            f'<a href="{page.entry.name}.html">{picture.html()}<span>{escape(picture.title)}</span></a>'
            for page in of_chapter
            for picture in page.pictures
        ]
        if links:
            text += f'\n## {chapter}\n\n<div class="grid">{"".join(links)}</div>\n'
    return "# Every plot, and what it shows\n" + (text or "\nNo plot of committed rows yet.\n")


def _run_sphinx(source, built, trees):
    command = [sys.executable, "-m", "sphinx", "-q", "-j", "auto", "-d", trees, source, built]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        raise notebooks.BatchError(f"Sphinx could not build the site: {completed.stderr[-500:]}")


def _write_page(path, source, names, is_run):
    """A notebook's page; at its foot how its problem's rows were measured and, folded, their tables."""
    text = _linked(path.read_text(encoding="utf-8"), names)
    notebook = nbformat.reads(text, as_version=4)
    entry = overview.read_entry(path.stem, notebook)
    _fold(notebook, is_run)
    extra = source / "extra"
    _write_attachments(notebook, path.stem, extra)
    pictures = list(_write_pictures(notebook, path.stem, extra))
    if links := list(_copy_tables(path.stem[3:].partition("-")[0], extra)):
        line = f"<summary>Rows {' '.join(re.findall(_MEASURED, text)[:1])}</summary>"
        foot = f"<details>{line}{', '.join(links)}</details>"
        notebook.cells.append(nbformat.v4.new_markdown_cell(foot))
    nbformat.write(notebook, source / path.name)
    return _Page(entry, pictures)


def _copy_tables(slug, extra):
    """A link to each table of a problem, which is copied when its link is asked for."""
    figures = project().figures
    for table in sorted(figures.glob(f"*/{slug}/*.csv")):
        name = Path("rows", table.relative_to(figures))
        make_folder((extra / name).parent)
        shutil.copy(table, extra / name)
        yield f'<a href="{name}">{name}</a>'


def _write_attachments(notebook, stem, extra):
    """The picture of a text, one a cell, as a file with a link to it: myst-nb knows no attachments."""
    for cell in notebook.cells:
        for name, bundle in cell.pop("attachments", {}).items():
            place = f"pictures/{stem}-{name}"
            (extra / place).write_bytes(base64.b64decode(bundle["image/png"]))
            link = rf'<a href="{place}"><img src="{place}" alt="\1"></a>'
            cell.source = re.sub(r"!\[(.*)\]\(attachment:.*\)", link, cell.source)


def _write_pictures(notebook, stem, extra):
    """Title all plots, and yield those of committed rows, each when it is written."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            title = output.get("metadata", {}).get("image/png", {}).get("alt")
            if not title:
                continue
            cell.metadata.mystnb["image"] = {"alt": title}
            if overview.draws_committed_rows(cell.source):
                place = f"pictures/{stem}-{cell.id}.png"
                (extra / place).write_bytes(base64.b64decode(output.data["image/png"]))
                with Image.open(extra / place) as image:
                    yield _Picture(place, title, *image.size)


def _fold(notebook, is_run):
    """Fold what a reader does not need to follow: parameters, imports, solutions, checkers, measuring.

    Of committed notebooks also what the machine measured that executed them last.
    """
    section = heading = ""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            for line in re.findall("^##.*", cell.source, re.MULTILINE):
                heading = line
                if not line.startswith("###"):
                    section = line
            continue
        # Of a run, what its machine measured is what one reads.
        is_local = heading == "### This machine" and not is_run
        prompt, tags = _prompt_and_tags(cell, section, is_local)
        cell.metadata.setdefault("tags", []).extend(tags)
        cell.metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt}
        cell.source = re.sub(r"(?m)^ *### (BEGIN|END) SOLUTION\n?", "", cell.source)


def _prompt_and_tags(cell, section, is_local):
    """What stands on the fold of a code cell, and the tags by which it is folded."""
    tags = notebooks.tags_of(cell)
    if CHECKER in tags:
        return "The checker", [HIDE_INPUT]
    if has_solution(cell):
        return "A solution", [HIDE_INPUT]
    if not section:
        return "Parameters" if "parameters" in tags else "Set-up", ["hide-cell"]
    # Their output says it all.
    if re.match(r"solution\(|(labbook\.)?show_source\(", cell.source):
        return "Code", ["remove-input"]
    if "hide-cell" in tags or "page.measure(" in cell.source or is_local:
        return "Code and output", ["hide-cell"]
    if ASIDE in tags or section in ("## Measure", "## Results"):
        names = re.findall(r"(?m)^(?:class|def) (\w+)", cell.source)
        return ": ".join(["Code"] + names[:1]), [HIDE_INPUT]
    return "Code", []


def _linked(text, names):
    """A notebook in which a link to another leads to its page here, and one to a file not here is text."""

    def link(match):
        name = names.get(match["name"] or "")
        return f"[{match[1]}]({name}.ipynb{match['at'] or ''})" if name else match[1]

    return re.sub(_LINK, link, text)


def _by_chapter(pages):
    """The pages of each chapter that has some; "Start" is what comes before all of them."""
    chapters = {0: "Start"} | notebooks.book("chapters")
    by_chapter = {}
    for page in pages:
        first = max(number for number in chapters if number <= int(page.entry.name[:2]))
        by_chapter.setdefault(chapters[first], []).append(page)
    return by_chapter.items()


def _contents(pages):
    """The gallery, and the pages by chapter, as the side bar has them."""
    text = "```{toctree}\n:hidden:\n\ngallery\n```\n"
    for chapter, of_chapter in _by_chapter(pages):
        names = "\n".join(page.entry.name for page in of_chapter)
        text += f"\n```{{toctree}}\n:caption: {chapter}\n:maxdepth: 1\n:hidden:\n\n{names}\n```\n"
    return text
