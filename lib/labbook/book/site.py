"""Executed notebooks as a site that reads offline: chapters, search, a gallery of every plot, its rows.

Sphinx builds it, with myst-nb and furo (`pip install -e '.[site]'`). Nothing is executed. The site of a run
lies beside its notebooks; its first page says how each ended, and what failed.
"""

import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pandas as pd

from labbook.book import notebooks, runs
from labbook.book.notebooks import BatchError
from labbook.compare import longest_warmup
from labbook.files import REPOSITORY_FIGURES, find, locked
from labbook.labels import named_value
from labbook.machine import load_card
from labbook.rows import TABLES, load_rows
from labbook.tables import pivot

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
.plots a { display: inline-block; width: 14rem; margin: 0 1rem 1rem 0; vertical-align: top; }
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
_COLUMNS = ("notebook", "parameters", "status", "seconds", "reason")


def build(target: Path, executed: Path, unrecorded: Sequence[runs.Record] = ()) -> Path:
    """Write the site of the executed notebooks of a folder: into it, for a run's, or in place of another.

    A file is replaced whole, the first page as the last: one that is there stays until all others are.

    Args:
        unrecorded: how notebooks ended that have left no record in the folder.

    Returns:
        Its first page.

    Raises:
        BatchError: Sphinx is not installed, or could not build; or a notebook has not been executed.
    """
    wanted = ("sphinx", "myst_nb", "furo", "jupyter_server_mathjax")
    if missing := [name for name in wanted if find_spec(name) is None]:
        raise BatchError(f"{', '.join(missing)} is not installed; `pip install -e '.[site]'` does it")
    paths, records = sorted(executed.glob("*.ipynb")), runs.load_records(executed)
    if not paths:
        raise BatchError(f"there is no executed notebook in {executed}; `make run` makes some")
    with locked(target):
        scratch = target / ".site"
        shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
        source, built = scratch / "source", scratch / "built"
        (source / "extra" / "plots").mkdir(parents=True)
        pages = {path.stem.partition("-")[0]: path.stem for path in reversed(paths)}
        plots = {path.stem: _page(path, source, pages, path.stem in records) for path in paths}
        told = _outcomes(executed.name, records, unrecorded, plots) if records else ""
        shutil.copytree(REPOSITORY_FIGURES, source / "extra" / "rows", ignore=_all_but_rows)
        mathjax = Path(find_spec("jupyter_server_mathjax").origin).parent / "static"
        shutil.copytree(mathjax, source / "static" / "mathjax")
        texts = {"index.md": _contents([*plots], told), "gallery.md": _gallery(plots)}
        texts |= {"machines.md": _linked("\n".join(_machines()), pages), "conf.py": _CONFIG}
        texts |= {"static/workbook.css": _STYLE, "static/mathjax/config/workbook.js": _MATHJAX}
        for name, text in texts.items():
            (source / name).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-j", "auto", "-d", scratch / "trees"]
        done = subprocess.run([*map(str, [*command, source, built])], capture_output=True, text=True)
        if done.returncode:
            raise BatchError(f"Sphinx could not build the site: {done.stderr.strip()[-500:]}")
        if target != executed:
            for path in set(target.iterdir()) - {scratch, target / ".lock"}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        first = built / "index.html"
        for path in [*(path for path in built.rglob("*") if path.is_file() and path != first), first]:
            place = target / path.relative_to(built)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
        shutil.rmtree(scratch)
    return target / "index.html"


def _page(path: Path, source: Path, pages: Mapping[str, str], may_be_empty: bool) -> list[str]:
    """Write a notebook's page, its plots and its rows into the source; a line of HTML for each plot."""
    notebook, lines = nbformat.read(path, as_version=4), []
    if not may_be_empty and not any(cell.get("outputs") for cell in notebook.cells):
        raise BatchError(f"{path.name} has no outputs: `make notebooks` executes it")
    cells, notebook.cells = notebook.cells, []
    for cell in cells:
        cell.source = _linked(cell.source, pages)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/markdown" in data:
                data["text/markdown"] = _linked(data["text/markdown"], pages)
            title = output.get("metadata", {}).get("image/png", {}).get("alt")
            if title and not notebooks.is_last(path.stem):  # it shows the others'
                name = f"{path.stem}-{len(lines) + 1}"
                (source / "extra" / "plots" / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
                notebook.cells.append(nbformat.v4.new_markdown_cell(f'<a id="{name}"></a>'))
                shown = f'<img src="plots/{name}.png" alt="" width="600" loading="lazy">'
                lines.append(f'<a href="{path.stem}.html#{name}">{escape(title)}<br>{shown}</a>')
        notebook.cells.append(cell)
    links = _links(_tables_of(path.stem.partition("-")[0][3:], cells))
    notebook.cells += [nbformat.v4.new_markdown_cell(f"**Rows:** {links}")] * bool(links)
    nbformat.write(notebook, source / path.name)
    return lines


def _tables_of(slug: str, cells: Sequence[nbformat.NotebookNode]) -> Iterator[Path]:
    """The files of rows that a notebook saves, and those that its code names: others' and published ones."""
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    named = {slug, "published", *re.findall(r'"(\w+)"', code)}
    for path in sorted(REPOSITORY_FIGURES.glob("**/*.csv")):
        if path.parent.name == slug or {path.parent.name, path.stem} <= named:
            yield path


def _links(tables: Iterable[Path]) -> str:
    names = [table.relative_to(REPOSITORY_FIGURES) for table in tables]
    return ", ".join(f'<a href="rows/{name}">{name}</a>' for name in names)


def _all_but_rows(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_file() and not name.endswith(".csv")]


def _gallery(plots: Mapping[str, Sequence[str]]) -> str:
    text = "# Every plot, and what it shows\n"
    for name, shown in plots.items():
        text += f"\n## [{name[:2]}]({name}.ipynb)\n\n<p>{'</p><p>'.join(shown)}</p>\n" if shown else ""
    return text


def _linked(text: str, pages: Mapping[str, str]) -> str:
    """Markdown in which a link to a notebook leads to its page here, and one to a file not here is text."""

    def link(found: re.Match) -> str:
        name = pages.get(found["name"] or "")
        return f"[{found[1]}]({name}.ipynb{found['at'] or ''})" if name else found[1]

    return re.sub(r"\[([^]]*)\]\((?:\.\./[^)]*|(?P<name>\d\d_\w+)\.ipynb(?P<at>#[^)]*)?)\)", link, text)


def _machines() -> Iterator[str]:
    """The page of machines beside each other: of each table the times of what several of them measured."""
    yield "# Machines beside each other\n\nMedian times of what was measured on each, in milliseconds.\n"
    machines = sorted(path.parent.name for path in REPOSITORY_FIGURES.glob("*/machine.json"))
    for path in sorted(notebooks.NOTEBOOKS.glob("*.ipynb")):
        for name in (name for name, table in TABLES.items() if "p50_ms" in table.values):
            there = [each for each in machines if find(each, path.stem[3:], f"{name}.csv").exists()]
            if not there:
                continue
            rows = longest_warmup(pd.concat([load_rows(path.stem[3:], each, name) for each in there]))
            keys = [key for key in TABLES[name].keys if key != "warmup_steps"]
            if (rows := rows[rows.duplicated(keys, keep=False)]).empty:
                continue
            varying = [key for key in keys if rows[key].nunique(dropna=False) > 1] or keys[:1]
            fixed = [named_value(key, rows[key].iloc[0]) for key in keys if key not in varying]
            yield f"## [{path.stem[:2]}]({path.stem}.ipynb), {name}\n\n{', '.join(fixed)}\n"
            yield pivot(rows, varying, "machine").to_html(border=0) + "\n"
    if links := _links(sorted(REPOSITORY_FIGURES.glob("published/*.csv"))):
        yield f"## Published by others\n\n{links}\n"


def _outcomes(
    machine: str, records: Mapping[str, runs.Record], unrecorded: Sequence[runs.Record], plots: Mapping
) -> str:
    """The first page of a run: its machine, what failed and why, how each ended, and every plot, small."""
    names = [*records, *[""] * len(unrecorded)]
    table = pd.DataFrame([*records.values(), *unrecorded])[[*_COLUMNS]].astype(str).map(escape)
    links = [f'<a href="{name}.html">{{}}</a>' if name in plots else "{}" for name in names]
    table["notebook"] = [link.format(name) for link, name in zip(links, table["notebook"], strict=True)]
    counts = ", ".join(f"{count} {status}" for status, count in table["status"].value_counts().items())
    failed = table[table["status"] == "error"]
    items = [f"<li>{row.notebook} {row.parameters}: {row.reason}</li>" for row in failed.itertuples()]
    card = load_card(machine).line() if find(machine, "machine.json").exists() else ""
    why = ["## What failed, and why\n", "<ul>", *items, "</ul>\n"] * bool(items)
    ended = table.to_html(index=False, escape=False, border=0, justify="left")
    shown = "\n".join(plot for several in plots.values() for plot in several)
    lines = [f"# The workbook on {machine}\n\n{card}\n\n{len(table)} notebooks: {counts}.\n", *why]
    lines += ["## How each ended\n", ended, "\n## Its plots\n", f'<div class="plots">\n{shown}\n</div>\n']
    return "\n".join(lines)


def _contents(names: Sequence[str], told: str) -> str:
    """The first page: what is told of a run, and the chapters."""
    chapters = {0: "Start"} | notebooks.read_yaml("book.yaml").get("chapters", {})
    text, hidden = [told or f"# {_TITLE}\n"], [":hidden:"] * bool(told)
    for first, end in zip(chapters, [*[*chapters][1:], 100], strict=True):
        pages = [
            f"{name} <{name}>" if "-" in name else name for name in names if first <= int(name[:2]) < end
        ]
        pages += ["gallery", "machines"] * (first == 0)
        text += ["```{toctree}", f":caption: {chapters[first]}", ":maxdepth: 1", *hidden, *pages, "```\n"]
    return "\n".join(text)
