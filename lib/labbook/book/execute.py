"""Execute one notebook in a process of its own, which leaves nothing behind however it ends.

As a program: python -m labbook.book.execute SOURCE OUTPUT '{"model_size": "small"}'
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
from typing import Any

import psutil

MIB = 2**20
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True)
class Outcome:
    """How an execution ended. `status` is "ok", "error" (then `reason` says why) or "interrupted"."""

    status: str
    reason: str
    seconds: float
    peak_memory_mib: float


def execute(
    source: Path, output: Path, parameters: dict[str, Any], *, stop: threading.Event | None = None
) -> Outcome:
    """Execute a notebook with this Python; `output` is replaced when it has ended, well or with an error.

    Args:
        source: the notebook; its folder is the kernel's working directory.
        output: where the executed notebook goes. What was there stays until the new one is complete.
        parameters: values for its `parameters` cell.
        stop: set it from another thread to end the execution; everything started here is killed.

    Returns:
        The outcome; `peak_memory_mib` is the most host memory that the kernel and its children held, in MiB.
    """
    stop = stop or threading.Event()
    partial = output.with_name(f".{output.name}")  # left by a kill, replaced by the next run
    command = [sys.executable, "-m", __name__, str(source), str(partial), json.dumps(parameters)]
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as log:
        # Its stdin is our life sign: when we are killed the pipe closes, and it ends itself and its kernel
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and not stop.wait(_LOOK_EVERY_S):
                peak = max(peak, _resident_bytes(process.pid))
        finally:
            if process.poll() is None:
                stop.set()
                kill_tree(process.pid)
            process.stdin.close()
            code = process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
    seconds = time.perf_counter() - started
    if stop.is_set():
        partial.unlink(missing_ok=True)
        return Outcome("interrupted", "stopped", seconds, peak / MIB)
    if partial.exists():
        os.replace(partial, output)
    if code == 0:
        return Outcome("ok", "", seconds, peak / MIB)
    reason = said[-1] if code > 0 else f"killed by {signal.Signals(-code).name}, perhaps out of memory"
    return Outcome("error", reason, seconds, peak / MIB)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, itself last: it may be the one that calls."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [*top.children(recursive=True), top]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _resident_bytes(pid: int) -> int:
    """Memory of the descendants of a process."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            total += child.memory_info().rss
    return total


def _main(source: str, output: str, parameters: str) -> int:
    """Run it with papermill, in its own folder; print one line if that fails, saying what and where."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Here and not above: only this process needs the Jupyter libraries, which take a second to import.
    import papermill
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    class ThisPython(AsyncKernelManager):
        """Starts the ipykernel of the running interpreter, whatever kernels the user has installed."""

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(**get_kernel_dict())

    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        papermill.execute_notebook(
            source, output, json.loads(parameters), cwd=Path(source).parent, progress_bar=False,
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
    kill_tree(os.getpid())


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
