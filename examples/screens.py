"""How far a page's answers are from its top, in screens of 1400 x 900, for each page of site/.

`python examples/screens.py` after `make site`, with Chromium on the PATH. Folds are as a reader finds them.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

import websocket  # of jupyter_server

SCREEN = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
# Where formulas are done, the pixels above the section; nothing before.
ABOVE = """
(() => {
  const queue = window.MathJax?.Hub?.queue;
  if (document.readyState != "complete" || queue?.pending || queue?.running) return null;
  const heads = [...document.querySelectorAll("article h2")];
  const answer = heads.find((head) => head.textContent.startsWith("Answer"));
  return answer ? answer.getBoundingClientRect().top + scrollY : -1;
})()
"""


class Browser:
    """A Chromium without a window, asked over its debugging port."""

    def __init__(self, folder: str) -> None:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            sys.exit("there is no Chromium on the PATH")
        options = "--headless=new --no-sandbox --remote-debugging-port=0 --remote-allow-origins=*"
        self.process = subprocess.Popen(
            [program, *options.split(), f"--user-data-dir={folder}", "about:blank"],
            stderr=subprocess.DEVNULL,
        )
        said = Path(folder, "DevToolsActivePort")
        while not said.exists() or not said.read_text():
            time.sleep(0.1)
        port = said.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            tabs = json.load(answer)
        page = next(tab for tab in tabs if tab["type"] == "page")
        self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self.asked = 0

    def ask(self, method: str, **parameters: object) -> dict:
        """The result of one of the protocol's methods."""
        self.asked += 1
        message = {"id": self.asked, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while (answer := json.loads(self.socket.recv())).get("id") != self.asked:
            pass  # an event
        return answer["result"]

    def above(self, page: Path) -> float:
        """Pixels above a page's answers; below zero where it has none."""
        self.ask("Page.navigate", url=page.as_uri())
        before = None
        while True:
            time.sleep(0.2)
            now = self.ask("Runtime.evaluate", expression=ABOVE)["result"].get("value")
            if now is not None and now == before:
                return now
            before = now


def main(site: Path) -> None:
    """Print the screens of each page, and their median."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(folder)
        browser.ask("Emulation.setDeviceMetricsOverride", **SCREEN)
        pages = sorted(site.resolve().glob("[0-9]*.html"))
        screens = {page.stem: browser.above(page) / SCREEN["height"] for page in pages}
        browser.process.kill()
        browser.process.wait()
    screens = {name: far for name, far in screens.items() if far > 0}
    for name, far in screens.items():
        print(f"{far:5.1f}  {name}")
    print(f"{median(screens.values()):5.1f}  median; at most {max(screens.values()):.1f}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["site"]))
