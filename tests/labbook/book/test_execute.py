"""One notebook in a process of its own: how it can end, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from labbook.book.execute import execute

# Asleep with the interpreter locked, as in a long call into C: such a kernel cannot notice that it is alone.
SLEEP = """\
import ctypes, os
open("pid", "w").write(str(os.getpid()))
ctypes.PyDLL(None).sleep(60)
"""


def kernel_of(folder: Path) -> psutil.Process:
    """The process that runs SLEEP, once it does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "pid").exists() and (text := (folder / "pid").read_text()):
            return psutil.Process(int(text))
        time.sleep(0.05)
    raise AssertionError("the notebook never started")


def test_parameters_folder_interpreter_and_memory(tmp_path, write_notebook, monkeypatch):
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"  # the user's, not to be chosen
    kernel.parent.mkdir(parents=True)
    kernel.write_text('{"argv": ["false"], "display_name": "mine", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    code = "import os, sys\nblock = b'x' * 300_000_000\nprint(steps, os.getcwd(), sys.executable)"
    (tmp_path / "there").mkdir()
    source = write_notebook(tmp_path / "there" / "01_a.ipynb", code, "import time; time.sleep(1)")
    outcome = execute(source, tmp_path / "out.ipynb", {"steps": 7})
    assert (outcome.status, outcome.reason) == ("ok", "")
    assert outcome.host_memory_mib > 300
    printed = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-2].outputs[0].text
    assert printed == f"7 {source.parent} {sys.executable}\n"
    assert list(tmp_path.glob(".*")) == []


def test_an_error_is_one_line_and_the_notebook_is_kept(tmp_path, write_notebook):
    source = write_notebook(tmp_path / "01_a.ipynb", "print('before')", "raise ValueError('two\\nlines')")
    outcome = execute(source, tmp_path / "out.ipynb", {})
    assert (outcome.status, outcome.reason) == ("error", "cell [3]: ValueError: two lines")
    assert "before" in (tmp_path / "out.ipynb").read_text()


def test_a_kernel_that_dies_is_an_error(tmp_path, write_notebook):
    source = write_notebook(tmp_path / "01_a.ipynb", "import os; os.kill(os.getpid(), 9)")
    outcome = execute(source, tmp_path / "out.ipynb", {})
    assert (outcome.status, "died" in outcome.reason) == ("error", True)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_when_the_caller_is_killed_the_kernel_ends_and_the_former_output_stays(
    tmp_path, write_notebook, sign
):
    source, output = write_notebook(tmp_path / "01_a.ipynb", SLEEP), tmp_path / "out.ipynb"
    output.write_text("former")
    call = (
        "from pathlib import Path; import signal; from labbook.book.execute import execute;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"execute(Path({str(source)!r}), Path({str(output)!r}), {{}})"
    )
    caller = subprocess.Popen([sys.executable, "-c", call], stderr=subprocess.DEVNULL)
    kernel = kernel_of(tmp_path)
    os.kill(caller.pid, sign)
    caller.wait()
    kernel.wait(10)
    assert output.read_text() == "former"
    assert sign == signal.SIGKILL or list(tmp_path.glob(".*")) == []
