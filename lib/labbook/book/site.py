"""Executed notebooks as a site that reads offline: chapters, search, a gallery of every plot, their rows.

Sphinx builds it, with myst-nb and furo (`pip install -e '.[site]'`). Nothing is executed. The site of a run
lies beside its notebooks; its first page says how each ended.
"""

import base64
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

import nbformat

from labbook.book import batch, notebooks
from labbook.book.notebooks import BatchError
from labbook.files import find, locked
from labbook.machine import load_card
from labbook.project import project

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
    wanted = ("sphinx", "myst_nb", "furo", "jupyter_server_mathjax")
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise BatchError(
            f"{', '.join(missing)} is not installed; `pip install -e '.[site]'` does it"
        )
    paths, found = sorted(executed.glob("*.ipynb")), sorted(executed.glob("*.json"))
    if not paths:
        raise BatchError(f"there is no executed notebook in {executed}; `make run` makes some")
    with locked(target), tempfile.TemporaryDirectory() as scratch:
        source, built = Path(scratch) / "source", Path(scratch) / "built"
        (source / "extra" / "plots").mkdir(parents=True)
        pages = {path.stem.partition("-")[0]: path.stem for path in reversed(paths)}
        told = batch.summary([*filter(None, map(batch.load_outcome, found))])
        plots = {path.stem: _page(path, source, pages, bool(told)) for path in paths}
        first = f"# {_TITLE}\n"
        if told:
            card = (
                load_card(executed.name).line()
                if find(executed.name, "machine.json").exists()
                else ""
            )
            first = f"# The workbook on {executed.name}\n\n{card}\n\n~~~~text\n{told}\n~~~~\n"
        no_rows = shutil.ignore_patterns("*.png", "*.svg", "*.json", "snapshots")
        shutil.copytree(project().figures, source / "extra" / "rows", ignore=no_rows)
        mathjax = Path(find_spec("jupyter_server_mathjax").origin).parent / "static"
        shutil.copytree(mathjax, source / "static" / "mathjax")
        gallery = "# Every plot, and what it shows\n"
        for name, shown in plots.items():
            gallery += (
                f"\n## [{name[:2]}]({name}.ipynb)\n\n<p>{'</p><p>'.join(shown)}</p>\n"
                if shown
                else ""
            )
        texts = {"index.md": first + _contents([*plots]), "gallery.md": gallery, "conf.py": _CONFIG}
        texts |= {"static/workbook.css": _STYLE, "static/mathjax/config/workbook.js": _MATHJAX}
        for name, text in texts.items():
            (source / name).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "sphinx", "-q", "-j", "auto", "-d", f"{scratch}/trees"]
        done = subprocess.run([*command, source, built], capture_output=True, text=True)
        if done.returncode:
            raise BatchError(f"Sphinx could not build the site: {done.stderr.strip()[-500:]}")
        shutil.copytree(built, target, dirs_exist_ok=True)
    return target / "index.html"


def _page(path: Path, source: Path, pages: Mapping[str, str], may_be_empty: bool) -> list[str]:
    """Write a notebook's page, its plots and its rows into the source; a line of HTML for each plot."""
    notebook, lines = (
        nbformat.reads(_linked(path.read_text(encoding="utf-8"), pages), as_version=4),
        [],
    )
    cells, notebook.cells = notebook.cells, []
    if not may_be_empty and not any(cell.get("outputs") for cell in cells):
        raise BatchError(f"{path.name} has no outputs: `make notebooks` executes it")
    for cell in cells:
        for output in cell.get("outputs", []):
            title = output.get("metadata", {}).get("image/png", {}).get("alt")
            if title and not notebooks.is_last(path.stem):  # it shows the others'
                name = f"{path.stem}-{len(lines) + 1}"
                picture = base64.b64decode(output.data["image/png"])
                (source / "extra" / "plots" / f"{name}.png").write_bytes(picture)
                notebook.cells.append(nbformat.v4.new_markdown_cell(f'<a id="{name}"></a>'))
                shown = f'<img src="plots/{name}.png" alt="" width="600" loading="lazy">'
                lines.append(f'<a href="{path.stem}.html#{name}">{escape(title)}<br>{shown}</a>')
        notebook.cells.append(cell)
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    slug = path.stem[3:].partition("-")[0]
    named = {
        slug,
        "published",
        *re.findall(r'"(\w+)"', code),
    }  # of others it names problem and table
    tables = [
        table.relative_to(project().figures) for table in sorted(project().figures.glob("**/*.csv"))
    ]
    tables = [
        each
        for each in tables
        if each.parent.name == slug or {each.parent.name, each.stem} <= named
    ]
    links = ", ".join(f'<a href="rows/{table}">{table}</a>' for table in tables)
    notebook.cells += [nbformat.v4.new_markdown_cell(f"**Rows:** {links}")] * bool(links)
    nbformat.write(notebook, source / path.name)
    return lines


def _linked(text: str, pages: Mapping[str, str]) -> str:
    """A notebook in which a link to another leads to its page here, and one to a file not here is text."""

    def link(found: re.Match) -> str:
        name = pages.get(found["name"] or "")
        return f"[{found[1]}]({name}.ipynb{found['at'] or ''})" if name else found[1]

    return re.sub(
        r"\[([^][]*)\]\((?:\.\./[^)]*|(?P<name>\d\d_\w+)\.ipynb(?P<at>#[^)]*)?)\)", link, text
    )


def _contents(names: Sequence[str]) -> str:
    """The pages by chapter."""
    chapters = {0: "Start"} | notebooks.read_yaml("book.yaml").get("chapters", {})
    text = []
    for first, end in zip(chapters, [*[*chapters][1:], 100], strict=True):
        pages = [f"{name} <{name}>" for name in names if first <= int(name[:2]) < end]
        pages += ["gallery"] * (first == 0)
        text += ["```{toctree}", f":caption: {chapters[first]}", ":maxdepth: 1", *pages, "```\n"]
    return "\n".join(text)
