"""Executed notebooks as HTML that reads offline, formulas included, and an index of them."""

import html
import importlib.util
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from cs336_systems.measure.files import write_atomically

# jupyter_server_mathjax ships this configuration (nbconvert's default is another one, from a CDN) and STIX as
# its only font, which MathJax has to be told: left alone it waits for a font that is not there.
_MATHJAX = "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full,Safe,workbook"
_MATHJAX_CONFIG = """\
MathJax.Hub.Config({
  "HTML-CSS": { availableFonts: [], imageFont: null, preferredFont: null, webFont: "STIX-Web" },
  "fast-preview": { disabled: true },
  showMathMenu: false
});
MathJax.Ajax.loadComplete("[MathJax]/config/workbook.js");
"""
# nbconvert's page sets a listing that a cell displays as Markdown in a proportional font.
_PAGE_STYLE = """
.jp-RenderedMarkdown pre {
  font: var(--jp-code-font-size)/var(--jp-code-line-height) var(--jp-code-font-family);
}
"""
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; }
p { color: #555; margin-top: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .75rem; border-bottom: 1px solid #ddd; vertical-align: top; }
th { border-bottom: 2px solid #888; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.error { color: #b00020; }
"""


def render(notebook: Path) -> Path:
    """Write the HTML of a notebook beside it; formulas come from a `mathjax` folder there.

    Without the package jupyter_server_mathjax the page takes MathJax from the network, as nbconvert does.
    """
    from nbconvert import HTMLExporter

    options = {"require_js_url": "data:text/javascript,"}  # no widgets here: nothing to load
    if _copy_mathjax(notebook.parent / "mathjax"):
        options["mathjax_url"] = _MATHJAX
    body, _ = HTMLExporter(**options).from_filename(str(notebook))
    body = re.sub(r'(href="\d\d_\w+)\.ipynb"', r'\1.html"', body)  # from page to page, as between notebooks
    page = notebook.with_suffix(".html")
    write_atomically(page, body.replace("</head>", f"<style>{_PAGE_STYLE}</style>\n</head>", 1))
    return page


def _copy_mathjax(target: Path) -> bool:
    """Put MathJax into a folder, once; false where there is no copy to take it from."""
    spec = importlib.util.find_spec("jupyter_server_mathjax")
    if spec is None:
        return target.is_dir()
    if not target.is_dir():
        partial = target.with_name(f".{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(Path(spec.origin).parent / "static", partial)
        (partial / "config" / "workbook.js").write_text(_MATHJAX_CONFIG)
        partial.rename(target)
    return True


def write_index(
    path: Path,
    title: str,
    subtitle: str,
    columns: Sequence[str],
    rows: Iterable[tuple[str | None, Sequence[str]]],
) -> None:
    """Write a page with one table.

    Args:
        path: the file.
        title: heading.
        subtitle: one line under it.
        columns: headings of the columns; those from the fourth on hold numbers.
        rows: (page that the first field links to, or None; the fields as text).
    """
    head = "".join(f"<th{_kind(i)}>{html.escape(name)}</th>" for i, name in enumerate(columns))
    body = "\n".join(_row(link, fields) for link, fields in rows)
    write_atomically(
        path,
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(subtitle)}</p>\n"
        f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>\n</body>\n</html>\n',
    )


def _kind(column: int) -> str:
    return ' class="number"' if column >= 3 else ""


def _row(link: str | None, fields: Sequence[str]) -> str:
    cells = [html.escape(field) for field in fields]
    if link:
        cells[0] = f'<a href="{html.escape(link)}">{cells[0]}</a>'
    failed = fields[2] not in ("ok", "")
    kinds = [' class="error"' if failed and i == 2 else _kind(i) for i in range(len(cells))]
    row = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{row}</tr>"
