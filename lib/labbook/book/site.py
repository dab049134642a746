"""The executed notebooks as a site that reads offline: chapters, search, a gallery of every plot, its rows.

Sphinx builds it, with myst-nb and furo (`pip install -e '.[site]'`). Nothing is executed.
"""

import base64
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pandas as pd
from nbformat import NotebookNode

from labbook.book import notebooks
from labbook.book.notebooks import BatchError
from labbook.book.pages import copy_mathjax
from labbook.compare import longest_warmup
from labbook.files import REPOSITORY_FIGURES, find
from labbook.labels import named_value
from labbook.rows import TABLES, load_rows
from labbook.tables import pivot

_CONFIG = """\
project = html_title = "Making language models train fast, measured"
extensions, html_theme = ["myst_nb"], "furo"
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath"]
suppress_warnings = ["myst.header", "myst.xref_missing", "mystnb.unknown_mime_type"]
mathjax_path = "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full,Safe,workbook"
myst_update_mathjax = False
mathjax2_config = {"tex2jax": {"processClass": "math"}}
html_static_path, html_extra_path = ["static"], ["extra"]
html_show_sphinx, copyright = False, ""
"""


def build(target: Path, folder: Path | None = None) -> Path:
    """Write the site of the notebooks in a folder, by default the committed ones, in place of what is there.

    Returns:
        Its first page.

    Raises:
        BatchError: Sphinx is not installed, or could not build; or a notebook has not been executed.
    """
    if missing := [name for name in ("sphinx", "myst_nb", "furo") if find_spec(name) is None]:
        raise BatchError(f"{', '.join(missing)} is not installed; `pip install -e '.[site]'` does it")
    executed = folder or notebooks.NOTEBOOKS
    if not any(executed.glob("*.ipynb")):
        raise BatchError(f"there is no executed notebook in {executed}; `make run` makes some")
    with tempfile.TemporaryDirectory() as scratch:
        source, built = Path(scratch) / "source", Path(scratch) / "built"
        (source / "extra").mkdir(parents=True)
        copy_mathjax(source / "static" / "mathjax")
        (source / "conf.py").write_text(_CONFIG, encoding="utf-8")
        gallery = [line for path in sorted(executed.glob("*.ipynb")) for line in _page(path, source)]
        (source / "gallery.md").write_text("# Every plot, and what it shows\n\n" + "\n".join(gallery))
        (source / "machines.md").write_text("\n".join(_machines()), encoding="utf-8")
        (source / "index.md").write_text(_contents(source), encoding="utf-8")
        command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-j", "auto", source, built]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            raise BatchError(f"Sphinx could not build the site: {done.stderr.strip()[-500:]}")
        for page in built.glob("*.html"):  # links in outputs, which Sphinx does not follow
            text = re.sub(r'(href="\d\d_\w+)\.ipynb', r"\1.html", page.read_text(encoding="utf-8"))
            page.write_text(text, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(built, target)
    return target / "index.html"


def _page(path: Path, source: Path) -> list[str]:
    """Write a notebook's page, its plots and its rows into the source; its lines of the gallery."""
    notebook, lines = nbformat.read(path, as_version=4), []
    if not any(cell.get("outputs") for cell in notebook.cells):
        raise BatchError(f"{path.name} has no outputs: `make notebooks` executes it")
    for cell in list(notebook.cells):
        # Without links to files that are not on the site.
        cell.source = re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", cell.source)
        for output in [] if notebooks.is_last(path.stem) else cell.get("outputs", []):  # it shows the others'
            if title := output.get("metadata", {}).get("image/png", {}).get("alt"):
                name = f"{path.stem}-{len(lines) + 1}"
                picture = source / "extra" / "plots" / f"{name}.png"
                picture.parent.mkdir(exist_ok=True)
                picture.write_bytes(base64.b64decode(output.data["image/png"]))
                _insert(notebook, cell, f'<a id="{name}"></a>')
                link = f"{path.stem}.html#{name}"
                lines.append(
                    f'<p><a href="{link}">{title}<br><img src="plots/{name}.png" width="600"></a></p>\n'
                )
    if rows := sorted(REPOSITORY_FIGURES.glob(f"*/{path.stem[3:]}/*.csv")):
        links = []
        for table in rows:
            name = table.relative_to(REPOSITORY_FIGURES)
            copied = source / "extra" / "rows" / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(table, copied)
            links.append(f'<a href="rows/{name}">{name}</a>')
        notebook.cells.append(nbformat.v4.new_markdown_cell("**Rows:** " + ", ".join(links)))
    nbformat.write(notebook, source / path.name)
    return [f"## [{path.stem[:2]}]({path.stem}.ipynb)\n", *lines] if lines else []


def _insert(notebook: NotebookNode, before: NotebookNode, text: str) -> None:
    place = next(n for n, cell in enumerate(notebook.cells) if cell is before)
    notebook.cells.insert(place, nbformat.v4.new_markdown_cell(text))


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


def _contents(source: Path) -> str:
    """The first page: the notebook that starts, chapters, the gallery."""
    names = sorted(path.stem for path in source.glob("*.ipynb"))
    chapters = {0: "Start"} | notebooks.read_yaml("book.yaml").get("chapters", {})
    text = ["# Making language models train fast, measured\n"]
    for first, end in zip(chapters, [*[*chapters][1:], 100], strict=True):
        pages = [name for name in names if first <= int(name[:2]) < end] + ["gallery", "machines"] * (
            first == 0
        )
        text += ["```{toctree}", f":caption: {chapters[first]}", ":maxdepth: 1", *pages, "```\n"]
    return "\n".join(text)
