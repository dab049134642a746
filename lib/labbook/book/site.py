"""Executed notebooks as a site that reads offline: chapters, search, tables of rows.

Sphinx builds it, with myst-nb and furo (`pip install -e '.[site]'`). Nothing is executed. The site of a run
lies beside its notebooks; its first page says how each ended.
"""

import base64
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labbook.book import batch, notebooks
from labbook.book.notebooks import BatchError
from labbook.book.tidy import CHECKER, HIDE_INPUT, has_solution
from labbook.files import find, locked, make_folder
from labbook.machine import load_card
from labbook.project import project

_PACKAGES = ("sphinx", "myst_nb", "furo", "jupyter_server_mathjax")
_LINK = r"\[([^][]*)\]\((?:\.\./[^)]*|(?P<name>\d\d_\w+)\.ipynb(?P<at>#[^)]*)?)\)"
_TITLE = "Making language models train fast, measured"
_CONFIG = f"""\
project = html_title = "{_TITLE}"
extensions, html_theme = ["myst_nb"], "furo"
nb_execution_mode, nb_render_markdown_format = "off", "myst"
myst_enable_extensions = ["dollarmath", "amsmath"]
mathjax_path = "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full,Safe,workbook"
myst_update_mathjax = False
mathjax2_config = {{"tex2jax": {{"processClass": "math"}}}}
html_static_path, html_extra_path = ["static"], ["extra"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
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
  showMathMenu: false
});
MathJax.Ajax.loadComplete("[MathJax]/config/workbook.js");
"""


def build(target: Path, executed: Path) -> Path:
    """Write the site of the executed notebooks of a folder into another, or, for a run's, into the same.

    Returns its first page.
    Raises BatchError: Sphinx is not installed, or could not build; or a notebook has not been executed.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        remedy = "`pip install -e '.[site]'` does it"
        raise BatchError(f"{', '.join(missing)} is not installed; {remedy}")
    paths = notebooks.paths(executed)
    if not paths:
        raise BatchError(f"there is no executed notebook in {executed}; `make run` makes some")
    outcomes = map(batch.load_outcome, sorted(executed.glob("*.json")))
    summary = batch.summary(list(filter(None, outcomes)))
    with locked(target), tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        source.mkdir()
        names = {path.stem.partition("-")[0]: path.stem for path in reversed(paths)}
        for path in paths:
            _write_page(path, source, names, bool(summary))
        mathjax = Path(find_spec("jupyter_server_mathjax").origin).parent / "static"
        shutil.copytree(mathjax, source / "static" / "mathjax")
        for name in ("site.css", "site.js"):
            shutil.copy(Path(__file__).with_name(name), source / "static")
        texts = {
            "index.md": _first_page(executed.name, summary)
            + _contents(path.stem for path in paths),
            "conf.py": _CONFIG,
            "static/mathjax/config/workbook.js": _MATHJAX,
        }
        for name, text in texts.items():
            (source / name).write_text(text, encoding="utf-8")
        built = Path(scratch, "built")
        _run_sphinx(source, built, Path(scratch, "trees"))
        shutil.copytree(built, target, dirs_exist_ok=True)
    return target / "index.html"


def _first_page(machine: str, summary: str) -> str:
    """Of a run: how each notebook ended. Else what the workbook is."""
    if summary:
        has_card = find(machine, "machine.json").exists()
        card = load_card(machine).line() if has_card else ""
        return f"# The workbook on {machine}\n\n{card}\n\n~~~~text\n{summary}\n~~~~\n"
    about = notebooks.read_yaml("book.yaml").get("about", "")
    return f"# {_TITLE}\n\n{about}\n\n"


def _run_sphinx(source: Path, built: Path, trees: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-j", "auto", "-d", trees, source, built]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BatchError(f"Sphinx could not build the site: {done.stderr.strip()[-500:]}")


def _write_page(path: Path, source: Path, names: Mapping[str, str], may_be_empty: bool) -> None:
    """A notebook's page, with a link to each table of its problem's rows."""
    notebook = nbformat.reads(_linked(path.read_text(encoding="utf-8"), names), as_version=4)
    if not may_be_empty and not any(cell.get("outputs") for cell in notebook.cells):
        raise BatchError(f"{path.name} has no outputs: `make notebooks` executes it")
    for cell in notebook.cells:
        for name, bundle in cell.pop("attachments", {}).items():  # which myst-nb does not know
            picture = f"{path.stem}-{name}"
            (source / picture).write_bytes(base64.b64decode(bundle["image/png"]))
            cell.source = cell.source.replace(f"attachment:{name}", picture)
    _fold(notebook)
    figures = project().figures
    links = []
    for table in sorted(figures.glob(f"*/{path.stem[3:].partition('-')[0]}/*.csv")):
        name = Path("rows", table.relative_to(figures))
        make_folder((source / "extra" / name).parent)
        shutil.copy(table, source / "extra" / name)
        links.append(f'<a href="{name}">{name}</a>')
    if links:
        text = f"**Rows:** {', '.join(links)}"
        notebook.cells.append(nbformat.v4.new_markdown_cell(text))
    nbformat.write(notebook, source / path.name)


def _fold(notebook: NotebookNode) -> None:
    """Fold what a reader does not need to follow: parameters and imports, solutions, checkers, other code."""
    is_set_up = True
    for cell in notebook.cells:
        if cell.source.startswith("## "):
            is_set_up = False
        if cell.cell_type != "code":
            continue
        tags = cell.metadata.setdefault("tags", [])
        prompt = "Code"
        if has_solution(cell) or CHECKER in tags:
            prompt = "A solution" if has_solution(cell) else "The checker"
            tags.append(HIDE_INPUT)
        elif is_set_up:
            prompt = "Parameters and set-up"
            tags.append("hide-cell")
        elif cell.source.startswith("solution("):
            tags.append("remove-input")
        cell.metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt}


def _linked(text: str, names: Mapping[str, str]) -> str:
    """A notebook in which a link to another leads to its page here, and one to a file not here is text."""

    def link(match: re.Match) -> str:
        name = names.get(match["name"] or "")
        return f"[{match[1]}]({name}.ipynb{match['at'] or ''})" if name else match[1]

    return re.sub(_LINK, link, text)


def _contents(names: Iterable[str]) -> str:
    """The pages by chapter, on the first page and in the side bar."""
    text = []
    for chapter, of_chapter in groupby(names, notebooks.chapter_of):
        text += ["```{toctree}", f":caption: {chapter}", ":maxdepth: 1"]
        text += of_chapter
        text.append("```\n")
    return "\n".join(text)
