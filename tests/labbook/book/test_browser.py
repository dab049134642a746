"""A learner in JupyterLab, in a headless browser. Needs `pip install playwright` and Chromium on the PATH."""

import os
import re
import socket
import subprocess
import sys

import nbformat
import pytest

from labbook.book.notebooks import NOTEBOOKS
from labbook.book.tidy import CHECKER, has_solution, write_copies

NAME = "13_mixed_precision_accumulation.ipynb"
SETUP = (0, 1)  # of the code cells
NEAR_MS = 180_000  # a kernel starts, and the machine's card is measured


@pytest.fixture
def lab(tmp_path):
    """Address of a JupyterLab on a learner's copy."""
    list(write_copies([NOTEBOOKS / NAME], tmp_path / "learn"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--notebook-dir={tmp_path / 'learn'}", "--IdentityProvider.token="]
    with open(tmp_path / "lab.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HOME": str(tmp_path)})
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(30)


@pytest.fixture
def page(browser):
    return browser.new_page(viewport={"width": 1400, "height": 3000})


def test_a_solution_typed_into_the_copy_turns_its_checker_green(page, lab):
    playwright = pytest.importorskip("playwright.sync_api")

    code = [cell for cell in nbformat.read(NOTEBOOKS / NAME, 4).cells if cell.cell_type == "code"]
    solution = next(number for number, cell in enumerate(code) if has_solution(cell))
    checker = next(number for number, cell in enumerate(code) if CHECKER in cell.metadata.get("tags", []))
    for _ in range(60):  # until the server answers
        try:
            page.goto(f"{lab}/lab/tree/{NAME}")
            break
        except playwright.Error:
            page.wait_for_timeout(1000)
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    says = playwright.expect(cells.nth(checker).locator(".jp-OutputArea"))

    def run(*numbers):
        for number in numbers:
            cells.nth(number).locator(".cm-content").click(timeout=NEAR_MS)
            page.keyboard.press("Shift+Enter")

    run(*SETUP, solution, checker)
    says.to_contain_text("step 1, the grid: not yet", timeout=NEAR_MS)
    cells.nth(solution).locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.insert_text(re.sub(r" *### (BEGIN|END) SOLUTION\n?", "", code[solution].source))
    run(solution, checker)
    says.to_contain_text("step 1, the grid: right", timeout=NEAR_MS)
    playwright.expect(cells.nth(checker)).not_to_contain_text("✗")
