"""A notebook executed in a process of its own, this module as a program: nothing is left, however it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import papermill
import psutil
from papermill.exceptions import PapermillExecutionError


@dataclass(frozen=True)
class Outcome:
    """How a job ended, as kept beside its executed notebook.

    status: "ok", "error" or "skipped"; then `reason` says why. code: what that depends on, by name.
    rows: how many of the notebook's problem its machine had then.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    notebook: str = ""
    parameters: str = ""
    code: dict[str, str] = field(default_factory=dict)
    rows: int = 0


def execute(source: Path, output: Path, parameters: dict) -> Outcome:
    """Execute a notebook with this Python; `output` is replaced when it has ended, well or with an error.

    Its folder is the kernel's working directory. Everything that is started here ends with this process.
    """
    partial = output.with_name(f".{output.name}")  # left by a kill, replaced by the next run
    started = time.perf_counter()
    arguments = json.dumps([str(source), str(partial), parameters, os.getpid()])
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process
    )
    reason = process.communicate()[0]
    if process.returncode < 0:  # it could not say why
        reason = f"killed by {signal.Signals(-process.returncode).name}, perhaps out of memory"
    elif process.returncode:
        reason = f"exit code {process.returncode}"
    if partial.exists():
        os.replace(partial, output)
    seconds = round(time.perf_counter() - started, 1)
    return Outcome("error" if reason else "ok", reason, seconds)


def _main(source, output, parameters, parent):
    """The process: print why papermill failed, in one line, or nothing. It ends when its parent does.

    parent: its number, by which one that ended during the imports is not found.
    """
    threading.Thread(target=_end_with, args=[psutil.Process(parent)], daemon=True).start()
    # What kernels say outside of their cells goes where standard error does: `execute` has it lead nowhere.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The kernel "python3" is this Python's, whatever the user has.
    os.environ.pop("JUPYTER_PATH", None)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    with report:
        report.write(" ".join(_reason(source, output, parameters).split()))


def _end_with(parent):
    """Kill this process when its parent ends, and all its descendants before itself."""
    parent.wait()
    this = psutil.Process()
    for process in this.children(recursive=True) + [this]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _reason(source, output, parameters):
    """Why papermill failed; empty when it did not."""
    try:
        notebook = papermill.execute_notebook(
            source,
            output,
            parameters,
            cwd=Path(source).parent,
            progress_bar=False,
            kernel_name="python3",
            language="python",
            extra_arguments=["--IPKernelApp.extra_extensions=labbook.book.kernel"],
        )
    except PapermillExecutionError as error:
        return f"cell [{error.exec_count}]: {error.ename}: {error.evalue}"
    except Exception as error:  # DeadKernelError: Kernel died, and others
        return f"{type(error).__name__}: {error}"
    results = [result for cell in notebook.cells for result in cell.get("outputs", ())]
    # papermill takes sys.exit(0) for success.
    if any(result.get("ename") == "SystemExit" for result in results):
        return "it ended before its last line: sys.exit(0)?"
    return ""


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
