"""Start n workers in fresh processes and bring back their results, or the first error; no process stays.

    losses = launch(train, 4, config, steps=10)    # train(context, config, steps=10) in each of 4 processes

A worker is a function of an importable module: its process imports it by name. The same function runs on
several machines under torchrun, through `python -m cs336_systems.parallel`.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cs336_systems.parallel.worker import choose_backend, find_worker

T = TypeVar("T")

# A worker looks for modules where its caller does, and does not run the caller's script again.
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pathlib import Path
from cs336_systems.parallel.worker import main
main(Path(sys.argv[2]), int(sys.argv[3]))
"""
_POLL_S = 0.02
_GRACE_S = 0.5  # after a failure, for its echoes in the other workers: the cause is told from them by time
_ECHOES = ("by peer", "remote process exited")  # what Gloo and NCCL raise when another worker is gone
_LAST_LINES = 20


class WorkerError(RuntimeError):
    """A worker failed; the message names its rank and carries its traceback."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def launch(
    worker: Callable[..., T],
    world_size: int,
    *args: Any,
    backend: str = "auto",
    timeout_s: float = 600.0,
    **kwargs: Any,
) -> list[T]:
    """Run `worker(context, *args, **kwargs)` in `world_size` processes of one process group.

    What the workers print appears here, each line with its rank. The caller's environment reaches them
    unchanged, except that a Gloo worker computes on one thread (OMP_NUM_THREADS=1), as they share the CPU.

    Args:
        worker: function at the top level of an importable module; its first argument is a `WorkerContext`.
        backend: "gloo" (CPU), "nccl" (one GPU each), or "auto": NCCL where there are enough GPUs, else Gloo.
        timeout_s: seconds after which the run counts as hanging; also the time limit of each collective.

    Returns:
        The workers' results, by rank.

    Raises:
        WorkerError: a worker raised, died, or was not done in time. All workers are gone by then.
        ValueError: the worker cannot be imported by its name, or world_size or backend is not possible here.
        TypeError: the arguments cannot be pickled.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; allowed: a whole number, 1 or more")
    address = _address(worker)
    backend = choose_backend(backend, world_size)
    with tempfile.TemporaryDirectory(prefix="cs336-launch-") as name:
        folder = Path(name)
        job = {
            "worker": address,
            "arguments": _pickled(args, kwargs),
            "backend": backend,
            "timeout_s": timeout_s,
            "init_method": f"file://{folder / 'rendezvous'}",  # a file of our own: no port to clash over
        }
        (folder / "job").write_bytes(pickle.dumps(job))
        workers: list[_Process] = []
        try:
            for rank in range(world_size):
                workers.append(_Process(folder, rank, world_size, backend))
            _wait(workers, timeout_s)
        finally:
            for process in workers:
                process.end()
        return [process.result() for process in workers]


def _address(worker: Callable[..., Any]) -> str:
    module, name = getattr(worker, "__module__", None), getattr(worker, "__qualname__", None)
    try:
        found = find_worker(f"{module}:{name}") if name and module != "__main__" else None
    except ValueError:
        found = None
    if found is not worker:
        raise ValueError(
            f"worker {worker!r} cannot be started: a fresh process has to import it by name; allowed: a "
            "function at the top level of a module (no lambda, nothing defined in a notebook or a script)"
        )
    return f"{module}:{name}"


def _pickled(args: tuple, kwargs: dict) -> bytes:
    try:
        return pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(f"the arguments cannot be sent to the workers: {error}") from error


def _environment(rank: int, world_size: int, backend: str) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    environment = os.environ | {name: str(value) for name, value in ranks.items()} | {"PYTHONUNBUFFERED": "1"}
    if backend == "gloo":
        environment["OMP_NUM_THREADS"] = "1"
        # All workers are on this machine; Gloo would look up the host's name, which may lead nowhere.
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return environment


class _Process:
    """One worker's process, seen from the caller."""

    def __init__(self, folder: Path, rank: int, world_size: int, backend: str):
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.log = (folder / f"log-{rank}").open("w+b")
        self.shown = 0  # bytes of the log
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path), str(folder), str(rank)],
            env=_environment(rank, world_size, backend),
            stdin=subprocess.PIPE,  # closes when the caller dies, however it dies, and the worker follows
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own: its children end with it
        )

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it for zombies
            os.killpg(self.popen.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()
        self.show_output()
        self.popen.stdin.close()
        self.log.close()

    def result(self) -> Any:
        return pickle.loads((self.folder / f"result-{self.rank}").read_bytes())

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def succeeded(self) -> bool:
        return not self.running and (self.folder / f"result-{self.rank}").exists()

    @property
    def failed(self) -> bool:
        return not self.running and not self.succeeded

    def show_output(self) -> None:
        """Print the lines that the worker has written since the last call."""
        may_go_on = self.running  # asked before reading: only then is a last line without an end all of it
        log = self.log.fileno()
        for line in os.pread(log, os.fstat(log).st_size - self.shown, self.shown).splitlines(keepends=True):
            if may_go_on and not line.endswith(b"\n"):
                break
            self.shown += len(line)
            text = line.decode(errors="replace").rstrip()
            if not text.startswith("[Gloo] Rank"):  # some versions greet every group they connect
                print(f"[rank {self.rank}] {text}")

    def stack(self) -> str:
        """Where the worker was when it crashed or was asked, without the thread that watches for our end."""
        path = self.folder / f"stack-{self.rank}"
        threads = path.read_text().split("\n\n") if path.exists() else []
        return "\n\n".join(thread for thread in threads if " in watch\n" not in thread)

    def failure(self) -> tuple[tuple, str, str]:
        """How this worker ended, to find the first cause: (sort key, one sentence, details)."""
        error = self.folder / f"error-{self.rank}"
        if error.exists():
            raised = pickle.loads(error.read_bytes())
            urgency = 3 if any(words in raised["summary"] for words in _ECHOES) else 1
            return (urgency, raised["at"]), f"raised {raised['summary']}", raised["traceback"]
        details = "\n".join(filter(None, [self.stack(), self._last_lines()]))
        code = self.popen.returncode
        if code < 0:
            # Libraries abort when a peer is gone, so an abort is more often an echo than a cause.
            urgency = 2 if -code == signal.SIGABRT else 0
            return (urgency, 0), f"was ended by {signal.Signals(-code).name}", details
        return (1, 0), f"ended with exit code {code} before it returned", details

    def _last_lines(self) -> str:
        lines = (self.folder / f"log-{self.rank}").read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])


def _wait(workers: list[_Process], timeout_s: float) -> None:
    """Return when all have succeeded; raise WorkerError on the first failure or after the time limit."""
    deadline = time.monotonic() + timeout_s
    while not all(process.succeeded for process in workers):
        for process in workers:
            process.show_output()
        if any(process.failed for process in workers):
            _raise_failure(workers)
        if time.monotonic() > deadline:
            _raise_timeout(workers, timeout_s)
        time.sleep(_POLL_S)


def _wait_briefly(done: Callable[[], bool]) -> None:
    until = time.monotonic() + _GRACE_S
    while not done() and time.monotonic() < until:
        time.sleep(_POLL_S)


def _raise_failure(workers: list[_Process]) -> None:
    _wait_briefly(lambda: not any(process.running for process in workers))
    failures = sorted((*process.failure(), process.rank) for process in workers if process.failed)
    _, sentence, details, rank = failures[0]
    echoes = "".join(f"\nAfterwards rank {other} {said}" for _, said, _, other in failures[1:])
    raise WorkerError(rank, f"rank {rank} of {len(workers)} {sentence}\n\n{details}{echoes}".rstrip())


def _raise_timeout(workers: list[_Process], timeout_s: float) -> None:
    hanging = [process for process in workers if process.running]
    for process in hanging:
        process.signal(signal.SIGUSR1)
    _wait_briefly(lambda: all(process.stack().count("\n") > 1 for process in hanging))
    ranks = ", ".join(str(process.rank) for process in hanging)
    stacks = "\n".join(f"rank {process.rank} was at\n{process.stack()}" for process in hanging)
    sentence = f"rank {ranks} of {len(workers)}: not done within {timeout_s:g} s"
    raise WorkerError(hanging[0].rank, f"{sentence}\n\n{stacks}".rstrip())
