"""Figures with sliders: the script shows what Python computed, at every setting (in node)."""

import json
import re
import shutil
import subprocess
from itertools import product
from urllib.parse import unquote

import nbformat
import pytest

from labbook import Sliders
from labbook.files import NOTEBOOKS

NODE = shutil.which("node")
CONTROLS = {"batch_size": [1, 2, 4], "dtype": ["float32", "bfloat16"]}


def shown(html: str) -> list[str]:
    """What the script of an output shows at each setting, in the order of Python's product."""
    if not NODE:
        pytest.skip("node is not on the PATH")
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)[1]
    function, _, data = script.rpartition("})\n(" if "})\n(" in script else "})(")
    figure = data.removesuffix(", document.currentScript.previousElementSibling)")
    sizes = [len(values) for _, values in json.loads(figure)["controls"]]
    settings = json.dumps([*product(*map(range, sizes))])
    shows = f"{settings}.map({function}}})({figure}))"
    command = [NODE, "-e", f"console.log(encodeURIComponent(JSON.stringify({shows})))"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(unquote(said.strip()))


def bytes_held(batch_size, dtype):
    return [batch_size * {"float32": 4.0, "bfloat16": 2.0}[dtype], 100 / 7]


def test_bars_show_each_number_and_mark_the_most_and_what_is_above_the_limit():
    figure = Sliders(
        "bars", CONTROLS, bytes_held, labels=["kept </script>", "fixed"], unit="GiB", limit=15
    )
    texts = shown(figure.html())
    for (batch_size, dtype), text in zip(product(*CONTROLS.values()), texts, strict=True):
        kept, fixed = bytes_held(batch_size, dtype)
        assert re.findall(r"([\d.]+) GiB", text) == [f"{kept:.3g}", "14.3"]
        assert ("#D55E00" in text) == (kept > 15)
        assert re.search(r"<b>([\d.]+)", text)[1] == f"{max(kept, fixed):.3g}"


def test_lines_place_points_on_logarithmic_axes_and_cells_show_their_texts():
    def points(batch_size, dtype):
        return [[(10, batch_size)], [] if dtype == "float32" else [(1, 1), (100, 10)]]

    how = {"labels": ["a", "b"], "fixed": [[(1, 1), (100, 10)]], "xlabel": "x", "ylabel": "y"}
    texts = shown(Sliders("lines", CONTROLS, points, **how).html())
    assert 'cx="320.0" cy="250.0"' in texts[0]
    assert "a 1" in texts[0]
    assert [text.count("<polyline") for text in texts] == [1, 2] * 3
    rows = lambda batch_size, dtype: [[f"{batch_size} ←", ""], ["", dtype]]  # noqa: E731
    texts = shown(Sliders("cells", CONTROLS, rows, labels=["rank 0", "rank 1"]).html())
    assert ">4 ←</td>" in texts[-1]
    assert ">bfloat16</td>" in texts[-1]


def test_it_starts_where_it_is_told():
    start = {"batch_size": 4, "dtype": "bfloat16"}
    assert Sliders("bars", CONTROLS, bytes_held, start).figure["start"] == [2, 1]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem[:2])
def test_four_notebooks_have_them_and_something_to_show_at_every_setting(path):
    outputs = [out for cell in nbformat.read(path, 4).cells for out in cell.get("outputs", [])]
    found = [out.data for out in outputs if "sliders" in out.get("data", {}).get("text/plain", "")]
    assert bool(found) == (path.stem[:2] in ("16", "27", "52", "56"))
    for html in [data["text/html"] for data in found]:
        assert len(html) < 60_000
        for text in shown(html):
            assert text
            assert not re.search("NaN|undefined|Infinity", text)
