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
            [program] + options.split() + [f"--user-data-dir={folder}", "about:blank"],
            stderr=subprocess.DEVNULL,
        )
        port_file = Path(folder, "DevToolsActivePort")
        while not port_file.exists() or not port_file.read_text():
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as response:
            tabs = json.load(response)
        page = next(tab for tab in tabs if tab["type"] == "page")
        self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self.calls = 0

    def call(self, method: str, **parameters: object) -> dict:
        """The result of one of the protocol's methods."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while True:
            reply = json.loads(self.socket.recv())
            # An event has no id.
            if reply.get("id") == self.calls:
                return reply["result"]

    def pixels_above_answers(self, page: Path) -> float:
        """Below zero where a page has no answers."""
        self.call("Page.navigate", url=page.as_uri())
        before = None
        # Two times the same: nothing moves any more.
        while True:
            time.sleep(0.2)
            now = self.call("Runtime.evaluate", expression=ABOVE)["result"].get("value")
            if now is not None and now == before:
                return now
            before = now


def main(site: Path) -> None:
    """Print the screens of each page, and their median."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(folder)
        browser.call("Emulation.setDeviceMetricsOverride", **SCREEN)
        pages = sorted(site.resolve().glob("[0-9]*.html"))
        pixels = {page.stem: browser.pixels_above_answers(page) for page in pages}
        browser.process.kill()
        browser.process.wait()
    screens = {name: above / SCREEN["height"] for name, above in pixels.items() if above > 0}
    for name, above in screens.items():
        print(f"{above:5.1f}  {name}")
    print(f"{median(screens.values()):5.1f}  median; at most {max(screens.values()):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "site"))
