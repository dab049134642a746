"""Executed notebooks as HTML that reads offline, formulas included."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from labbook.files import locked, make_folder, write_atomically

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
# nbconvert's template knows no folded input, and sets a listing that a cell displays as Markdown in a
# proportional font.
_TEMPLATE = """\
{% extends 'lab/index.html.j2' %}
{% block html_head_css %}{{ super() }}
<style>
.jp-RenderedMarkdown pre {
  font: var(--jp-code-font-size)/var(--jp-code-line-height) var(--jp-code-font-family);
}
details.code { flex: 1; }
details.code > summary { color: var(--jp-ui-font-color2); cursor: pointer; }
</style>{% endblock %}
{% block input %}{% if 'hide-input' in cell.metadata.tags -%}
<details class="code"><summary>code</summary>{{ super() }}</details>
{%- else %}{{ super() }}{% endif %}{% endblock %}
"""


def render(notebook: Path) -> Path:
    """Write the HTML of a notebook beside it; formulas come from a `mathjax` folder there.

    The inputs of cells tagged `hide-input` are folded.
    """
    from nbconvert import HTMLExporter

    with locked(notebook.parent):  # another notebook may be done at the same moment
        copy_mathjax(notebook.parent / "mathjax")
    # No widgets here: no require.js to load.
    exporter = HTMLExporter(mathjax_url=_MATHJAX, require_js_url="data:text/javascript,")
    exporter.raw_template = _TEMPLATE
    body, _ = exporter.from_filename(str(notebook))
    body = re.sub(r'(href="\d\d_\w+)\.ipynb"', r'\1.html"', body)  # from page to page, as between notebooks
    page = notebook.with_suffix(".html")
    write_atomically(page, body)
    return page


def copy_mathjax(target: Path) -> None:
    """Put MathJax into a folder, once."""
    if target.is_dir():
        return
    partial = make_folder(target.parent) / f".{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    if (package := find_spec("jupyter_server_mathjax")) is None:
        raise ModuleNotFoundError("formulas need jupyter_server_mathjax, which is not installed")
    shutil.copytree(Path(package.origin).parent / "static", partial)
    (partial / "config" / "workbook.js").write_text(_MATHJAX_CONFIG)
    partial.rename(target)
