"""Execute one notebook in a process of its own, which leaves nothing behind however it ends.

As a program, python -m labbook.book.execute, it reads a line: ["SOURCE", "OUTPUT", {"model_size": "small"}].
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

_LOOK_EVERY_S = 0.25
# A kernel ends when it has tidied up: to take torch down, module by module, lasts seconds more.
_AT_EXIT = '__import__("atexit").register(__import__("os")._exit, 0);'


@dataclass(frozen=True)
class Outcome:
    """How an execution ended. `status` is "ok", "error" or "skipped"; then `reason` says why.

    host_memory_mib: the most that the kernel and its children held.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    host_memory_mib: float = 0.0


_ready: list[tuple[subprocess.Popen, IO]] = []  # processes that wait for a notebook, and their logs


def _start() -> tuple[subprocess.Popen, IO]:
    # It watches its stdin: when we are killed the pipe closes, and it ends itself and its kernel
    log = tempfile.TemporaryFile()  # noqa: SIM115  closed by who takes it
    how = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-m", __name__], **how), log


def execute(source: Path, output: Path, parameters: dict[str, Any], *, more: bool = False) -> Outcome:
    """Execute a notebook with this Python; `output` is replaced when it has ended, well or with an error.

    Its folder is the kernel's working directory. Ctrl-C ends everything that was started here.

    Args:
        more: another one will follow; the process for it starts, and imports what it needs, in the meantime.
    """
    partial = output.with_name(f".{output.name}")  # left by a kill, replaced by the next run
    started, peak, code = time.perf_counter(), 0, None
    process, log = _ready.pop() if _ready else _start()
    if more:
        _ready.append(_start())
    with log:
        try:
            with suppress(BrokenPipeError):  # it has ended
                process.stdin.write(json.dumps([str(source), str(partial), parameters]).encode() + b"\n")
                process.stdin.flush()
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LOOK_EVERY_S)
                with suppress(psutil.NoSuchProcess):
                    tree = psutil.Process(process.pid).children(recursive=True)
                    peak = max(peak, sum(each.memory_info().rss for each in tree))
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            if code is None:
                _kill_tree(process.pid)
                process.wait()
                partial.unlink(missing_ok=True)
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
    if partial.exists():
        os.replace(partial, output)
    if code < 0:
        said = [f"killed by {signal.Signals(-code).name}, perhaps out of memory"]
    seconds, mib = round(time.perf_counter() - started, 1), round(peak / 2**20)
    return Outcome("error" if code else "ok", said[-1] if code else "", seconds, mib)


def _kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, itself last: it may be the one that calls."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _main() -> int:
    """Run a notebook with papermill; print one line if that fails, saying what and where."""
    # Here and not above: only this process needs the Jupyter libraries, which take a second to import.
    import papermill
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill import engines
    from papermill.exceptions import PapermillExecutionError

    class ThisPython(AsyncKernelManager):
        """Starts the ipykernel of the running interpreter, whatever kernels the user has installed."""

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(**get_kernel_dict([f"--IPKernelApp.exec_lines={_AT_EXIT}"]))

    class SavedSeldom(engines.NotebookExecutionManager):
        """Writes the notebook once a second at most; papermill's own does before and after each cell."""

        def save(self, **how: Any) -> None:
            if (self.now() - self.last_save_time).total_seconds() > 1:
                super().save(**how)

    engines.NotebookExecutionManager = SavedSeldom
    logging.getLogger("papermill").setLevel(logging.ERROR)
    if not (line := sys.stdin.buffer.readline()):
        return 0  # there is none any more
    source, output, parameters = json.loads(line)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        papermill.execute_notebook(
            source, output, parameters, cwd=Path(source).parent, progress_bar=False,
            kernel_name="python3", language="python", kernel_manager_class=ThisPython,
        )  # fmt: skip
    except PapermillExecutionError as error:
        what = " ".join(f"{error.ename}: {error.evalue}".split())
        print(f"cell [{error.exec_count}]: {what}", file=sys.stderr)
        return 1
    except (DeadKernelError, CellTimeoutError) as error:
        print(f"the kernel died, perhaps out of memory ({' '.join(str(error).split())})", file=sys.stderr)
        return 1
    return 0


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns at the end of the pipe; sys.stdin would hold a lock at exit
    _kill_tree(os.getpid())


if __name__ == "__main__":
    sys.exit(_main())
