"""Execute one notebook in a process of its own, which leaves nothing behind however it ends."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# A kernel ends when it has tidied up: to take torch down, module by module, lasts seconds more.
_AT_EXIT = '__import__("atexit").register(__import__("os")._exit, 0);'


@dataclass(frozen=True)
class Outcome:
    """How an execution ended. `status` is "ok", "error" or "skipped"; then `reason` says why."""

    status: str
    reason: str = ""
    seconds: float = 0.0


def execute(source: Path, output: Path, parameters: dict[str, Any]) -> Outcome:
    """Execute a notebook with this Python; `output` is replaced when it has ended, well or with an error.

    Its folder is the kernel's working directory. Ctrl-C ends everything that was started here.
    """
    partial = output.with_name(f".{output.name}")  # left by a kill, replaced by the next run
    started = time.perf_counter()
    what = json.dumps([str(source), str(partial), parameters])
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, what], start_new_session=True,  # Ctrl-C is for this process
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        reason = process.communicate()[0]
    except BaseException:
        _kill_tree(process.pid)
        partial.unlink(missing_ok=True)
        raise
    if (code := process.returncode) < 0:  # it could not say why
        reason = f"killed by {signal.Signals(-code).name}, perhaps out of memory"
    elif code:
        reason = f"exit code {code}"
    if partial.exists():
        os.replace(partial, output)
    return Outcome("error" if reason else "ok", reason, round(time.perf_counter() - started, 1))


def _kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, itself last: it may be the one that calls."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _main(source: str, output: str, parameters: dict[str, Any]) -> None:
    """The process: print why papermill failed, in one line, or nothing. It ends when its parent does."""
    parent = psutil.Process().parent()
    threading.Thread(target=lambda: (parent.wait(), _kill_tree(os.getpid())), daemon=True).start()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels say outside of their cells goes nowhere
    os.environ.pop("JUPYTER_PATH", None)  # the kernel "python3" is this Python's, whatever the user has
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    import papermill
    from papermill.exceptions import PapermillExecutionError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        papermill.execute_notebook(
            source, output, parameters, cwd=Path(source).parent, progress_bar=False, kernel_name="python3",
            language="python", extra_arguments=[f"--IPKernelApp.exec_lines={_AT_EXIT}"],
        )  # fmt: skip
    except PapermillExecutionError as error:
        said.write(f"cell [{error.exec_count}]: {' '.join(f'{error.ename}: {error.evalue}'.split())}")
    except Exception as error:  # DeadKernelError: Kernel died, and others
        said.write(" ".join(f"{type(error).__name__}: {error}".split()))
    said.close()


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
