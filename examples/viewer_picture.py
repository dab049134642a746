"""A picture of PyTorch's memory viewer with a snapshot in it, taken by Chromium without a window.

    python examples/memory_viz_picture.py SNAPSHOT.pickle PICTURE.png [--viewer _memory_viz.py] [--d3 d3.js]

Needs `pip install playwright`, and Chromium on the PATH. The viewer loads its scripts from the network.
Without, `--viewer` names the `torch/cuda/_memory_viz.py` of torch 2.0, whose page has the viewer inside, and
`--d3` the file `dist/d3.js` of the npm package d3 (7). That is how the committed picture was made.
"""

import argparse
import importlib.util
import io
import pickle
import re
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Route, sync_playwright
from torch.cuda import _memory_viz

WIDTH, HEIGHT, POINTER = 1060, 1020, (420, 294)  # pixels; the pointer rests on an activation


def page_of(snapshot: Path, viewer: Path | None) -> str:
    """The viewer's page: of each stack only our frames, their files relative to the repository."""
    module = _memory_viz
    if viewer:
        spec = importlib.util.spec_from_file_location("viewer", viewer)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    seen = pickle.loads(snapshot.read_bytes())
    for event in (event for trace in seen["device_traces"] for event in trace):
        ours = [frame for frame in event["frames"] if "lib/cs336_systems/" in frame["filename"]]
        named = [frame["filename"].partition("lib/cs336_systems/")[2] for frame in ours]
        event["frames"] = [f | {"filename": name} for f, name in zip(ours, named, strict=True)]
    return module.trace_plot(seen)


def from_file(d3: Path) -> str:
    """d3 as the module that the viewer imports it as."""
    script = d3.read_text(encoding="utf-8")
    names = {*re.findall(r"^exports\.(\w+) = ", script, re.MULTILINE)} - {"window"}
    return f"{script}\nexport const {{{', '.join(sorted(names))}}} = globalThis.d3;\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("snapshot", "picture", "--viewer", "--d3"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    browsers = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        (path := Path(folder) / "viewer.html").write_text(page_of(given.snapshot, given.viewer))
        options = ["--no-sandbox", "--single-process", "--no-zygote", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path=next(browsers), args=options)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        if given.d3:
            reply = {"body": from_file(given.d3), "content_type": "text/javascript"}
            reply["headers"] = {"Access-Control-Allow-Origin": "*"}

            def answer(route: Route) -> None:
                route.continue_() if route.request.url.startswith("file:") else route.fulfill(**reply)

            page.route("**/*", answer)
        page.goto(path.as_uri())
        page.wait_for_timeout(2000)
        page.mouse.move(*POINTER)
        page.wait_for_timeout(500)
        seen = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    seen.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(given.picture, optimize=True)


if __name__ == "__main__":
    main()
