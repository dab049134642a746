"""Execute one notebook in a process of its own, which leaves nothing behind however it ends."""

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

# A kernel ends when it has tidied up: to take torch down, module by module, lasts seconds more.
_AT_EXIT = '__import__("atexit").register(__import__("os")._exit, 0);'
_PROCESSES = get_context("forkserver")  # whose server imports, once, what each of them needs
_PROCESSES.set_forkserver_preload(["papermill", "ipykernel.kernelspec", "jupyter_client"])


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
    started, reason = time.perf_counter(), None
    receive, send = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_run, args=(send, dict(os.environ), source, partial, parameters))
    process.start()
    send.close()
    try:
        reason = receive.recv()
    except EOFError:  # it could not say why
        process.join()
        reason = f"exit code {process.exitcode}"
        if process.exitcode < 0:
            reason = f"killed by {signal.Signals(-process.exitcode).name}, perhaps out of memory"
    finally:
        if reason is None:
            _kill_tree(process.pid)
            partial.unlink(missing_ok=True)
        process.join()
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


def _run(send: Connection, environment: dict[str, str], *what: Any) -> None:
    """The process: send why the execution failed, or "". With its kernel it ends when its parent does."""
    os.setsid()  # Ctrl-C is for the parent
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=lambda: (parent_process().join(), _kill_tree(os.getpid())), daemon=True).start()
    with open(os.devnull, "r+b") as nothing:  # what kernels say outside of their cells
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    send.send(_execute(*what))


def _execute(source: Path, output: Path, parameters: dict[str, Any]) -> str:
    """Run a notebook with papermill; one line if that fails, saying what and where."""
    # Here and not above: only this process needs the Jupyter libraries, which take a second to import.
    import papermill
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from papermill.exceptions import PapermillExecutionError

    class ThisPython(AsyncKernelManager):
        """Starts the ipykernel of the running interpreter, whatever kernels the user has installed."""

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(**get_kernel_dict([f"--IPKernelApp.exec_lines={_AT_EXIT}"]))

    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        papermill.execute_notebook(
            source, output, parameters, cwd=source.parent, progress_bar=False,
            kernel_name="python3", language="python", kernel_manager_class=ThisPython,
        )  # fmt: skip
    except PapermillExecutionError as error:
        return f"cell [{error.exec_count}]: {' '.join(f'{error.ename}: {error.evalue}'.split())}"
    except Exception as error:  # DeadKernelError: Kernel died, and others
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""
