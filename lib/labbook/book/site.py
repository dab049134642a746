"""Executed notebooks as a site that reads offline: chapters, search, their rows.

Sphinx builds it, with myst-nb and furo (`pip install -e '.[site]'`). Nothing is executed. The site of a run
lies beside its notebooks; its first page says how each ended.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

import nbformat

from labbook.book import batch, notebooks
from labbook.book.notebooks import BatchError
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
suppress_warnings = ["myst.header", "myst.xref_missing", "mystnb.unknown_mime_type"]
mathjax_path = "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full,Safe,workbook"
myst_update_mathjax = False
mathjax2_config = {{"tex2jax": {{"processClass": "math"}}}}
html_static_path, html_extra_path, html_css_files = ["static"], ["extra"], ["workbook.css"]
html_show_sphinx, html_copy_source, copyright = False, False, ""
html_show_search_summary = False  # it is fetched, which browsers refuse to a page that is a file
"""
_STYLE = """\
table.dataframe { display: block; overflow-x: auto; }
table.dataframe :is(td, th) { padding: .25rem .5rem; }
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
        (source / "extra").mkdir(parents=True)
        names = {path.stem.partition("-")[0]: path.stem for path in reversed(paths)}
        for path in paths:
            _write_page(path, source, names, bool(summary))
        mathjax = Path(find_spec("jupyter_server_mathjax").origin).parent / "static"
        shutil.copytree(mathjax, source / "static" / "mathjax")
        contents = _contents([path.stem for path in paths])
        texts = {
            "index.md": _first_page(executed.name, summary) + contents,
            "conf.py": _CONFIG,
            "static/workbook.css": _STYLE,
            "static/mathjax/config/workbook.js": _MATHJAX,
        }
        for name, text in texts.items():
            (source / name).write_text(text, encoding="utf-8")
        built = Path(scratch, "built")
        _run_sphinx(source, built, Path(scratch, "trees"))
        shutil.copytree(built, target, dirs_exist_ok=True)
    return target / "index.html"


def _first_page(machine: str, summary: str) -> str:
    if not summary:
        return f"# {_TITLE}\n"
    has_card = find(machine, "machine.json").exists()
    card = load_card(machine).line() if has_card else ""
    return f"# The workbook on {machine}\n\n{card}\n\n~~~~text\n{summary}\n~~~~\n"


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


def _linked(text: str, names: Mapping[str, str]) -> str:
    """A notebook in which a link to another leads to its page here, and one to a file not here is text."""

    def link(match: re.Match) -> str:
        name = names.get(match["name"] or "")
        return f"[{match[1]}]({name}.ipynb{match['at'] or ''})" if name else match[1]

    return re.sub(_LINK, link, text)


def _contents(names: Iterable[str]) -> str:
    """The pages by chapter."""
    chapters = {0: "Start"} | notebooks.read_yaml("book.yaml").get("chapters", {})
    ends = list(chapters)[1:] + [100]
    text = []
    for (first, chapter), end in zip(chapters.items(), ends, strict=True):
        text += ["```{toctree}", f":caption: {chapter}", ":maxdepth: 1"]
        text += [f"{name} <{name}>" for name in names if first <= int(name[:2]) < end]
        text.append("```\n")
    return "\n".join(text)
