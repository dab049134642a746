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
from labbook.project import project

NODE = shutil.which("node")
CONTROLS = {"batch_size": [1, 2, 4], "dtype": ["float32", "bfloat16"]}
START = {"batch_size": 4, "dtype": "bfloat16"}


def shown(html: str) -> list[str]:
    """What the script of an output shows at each setting, in the order of Python's product."""
    if not NODE:
        pytest.skip("node is not on the PATH")
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)[1]
    function, _, data = script.rpartition("})\n(" if "})\n(" in script else "})(")
    figure = data.removesuffix(", document.currentScript.previousElementSibling)")
    sizes = [len(values) for _, values in json.loads(figure)["controls"]]
    settings = json.dumps(list(product(*map(range, sizes))))
    shows = f"{settings}.map({function}}})({figure}))"
    command = [NODE, "-e", f"console.log(encodeURIComponent(JSON.stringify({shows})))"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(unquote(said.strip()))


def bytes_held(batch_size, dtype):
    return [batch_size * {"float32": 4.0, "bfloat16": 2.0}[dtype], 100 / 7]


def test_bars_show_each_number_and_what_is_above_the_limit():
    labels = ["kept </script>", "fixed"]
    sliders = Sliders(CONTROLS, bytes_held, START, labels=labels, unit="GiB", limit=15)
    assert sliders.figure["start"] == [2, 1]
    texts = shown(sliders.html())
    for (batch_size, dtype), text in zip(product(*CONTROLS.values()), texts, strict=True):
        kept, _ = bytes_held(batch_size, dtype)
        assert re.findall(r"([\d.]+) GiB", text) == [f"{kept:.3g}", "14.3"]
        assert ("#D55E00" in text) == (kept > 15)


@pytest.mark.parametrize("number", ["16", "56"])
def test_two_notebooks_have_them_and_something_to_show_at_every_setting(number):
    (path,) = project().notebooks.glob(f"{number}_*.ipynb")
    outputs = [out for cell in nbformat.read(path, 4).cells for out in cell.get("outputs", [])]
    shows = [output.get("data", {}) for output in outputs]
    found = [data for data in shows if "sliders" in data.get("text/plain", "")]
    assert found
    for html in [data["text/html"] for data in found]:
        assert len(html) < 60_000
        assert not [text for text in shown(html) if re.search("NaN|undefined|Infinity|^$", text)]
