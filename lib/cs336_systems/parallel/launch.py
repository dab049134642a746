"""Start n workers in fresh processes and bring back their results, or the first error; no process stays.

    losses = launch(train, 4, config, steps=10)        # train(context, config, steps=10) in each of 4
    for row in stream(measure, 4, sizes): ...          # what rank 0 hands to context.send, as it comes

A worker is a function of an importable module: its process imports it by name. The same function runs on
several machines under torchrun, through `python -m cs336_systems.parallel`.

torch.multiprocessing starts the processes: without a GPU as forks of a server that has imported torch once
for all of them, and that ends with the caller. Watching them is left to us: its own `join` blames the first
that it finds dead, often one that only lost its peer; it knows no time limit and mixes up the output.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.multiprocessing as mp

from cs336_systems.parallel.worker import Job, choose_backend, find_worker, main, message_path

T = TypeVar("T")

_PRELOADED = ["torch.distributed.fsdp", "pandas", "einops"]  # nothing of ours: the next launch sees an edit
_POLL_S = 0.02
_GRACE_S = 0.5  # after a failure, for its echoes in the other workers: the cause is told from them by time
_ECHOES = ("by peer", "remote process exited")  # what Gloo and NCCL raise when another worker is gone


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

    What the workers print appears here, each line with its rank. The caller's environment reaches them; over
    Gloo each computes on one thread (OMP_NUM_THREADS=1), as they share the CPU.

    Args:
        worker: function at the top level of an importable module; its first argument is a `WorkerContext`.
        backend: "gloo" (CPU), "nccl" (one GPU each), or "auto": NCCL where there are enough GPUs, else Gloo.
        timeout_s: seconds after which the run counts as hanging.

    Returns:
        The workers' results, by rank.

    Raises:
        WorkerError: a worker raised, died, or was not done in time. All workers are gone by then.
        ValueError: the worker cannot be imported by its name, or world_size or backend is not possible here.
        TypeError: the arguments cannot be pickled, or another process could not import what they are made of.
    """
    sent = stream(worker, world_size, *args, backend=backend, timeout_s=timeout_s, **kwargs)
    while True:
        try:
            next(sent)
        except StopIteration as end:
            return end.value


def stream(
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "auto",
    timeout_s: float = 600.0,
    **kwargs: Any,
) -> Generator[Any, None, list[Any]]:
    """As `launch`, and yield what rank 0 hands to `context.send`, as it comes. A loop left early ends all."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; allowed: a whole number, 1 or more")
    address, backend = _address(worker), choose_backend(backend, world_size)
    try:
        with _without_main():
            call = pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(
            f"the arguments cannot be sent to the workers: {error}; allowed: what can be pickled and "
            "imported (nothing defined in a notebook or a script)"
        ) from error
    return _run(address, call, world_size, backend, timeout_s)


def _address(worker: Callable[..., Any]) -> str:
    module, name = getattr(worker, "__module__", None), getattr(worker, "__qualname__", None)
    with contextlib.suppress(ValueError):
        if module != "__main__" and find_worker(f"{module}:{name}") is worker:
            return f"{module}:{name}"
    raise ValueError(
        f"worker {worker!r} cannot be started: a fresh process has to import it by name; allowed: a "
        "function at the top level of a module (no lambda, nothing defined in a notebook or a script)"
    )


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the caller's script: a spawned process would run it again, and so might what it unpickles."""
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _start_method() -> str:
    """A fork could not use a GPU that its parent has looked for, so where there is one there is none."""
    if sys.platform != "linux" or torch.cuda.is_available():
        return "spawn"
    multiprocessing.set_forkserver_preload(_PRELOADED)
    return "forkserver"


def _run(
    address: str, call: bytes, world_size: int, backend: str, timeout_s: float
) -> Generator[Any, None, list[Any]]:
    with tempfile.TemporaryDirectory(prefix="cs336-launch-") as name:
        folder, deadline = Path(name), time.monotonic() + timeout_s
        job = Job(address, call, world_size, backend, timeout_s, deadline, folder, dict(os.environ))
        for rank in range(world_size):
            (folder / f"log-{rank}").touch()
        with _without_main():
            started = mp.start_processes(main, (job,), world_size, join=False, start_method=_start_method())
        workers = [_Worker(rank, process, folder) for rank, process in enumerate(started.processes)]
        give_up = False
        try:
            while not all(worker.succeeded for worker in workers):
                for worker in workers:
                    yield from worker.news()
                failed = [worker for worker in workers if worker.failed]
                if failed and (give_up or len(failed) == world_size):
                    raise _failure(failed, world_size)
                if time.monotonic() > deadline + _GRACE_S:  # by now they have written where they are
                    raise _timeout([each for each in workers if not each.succeeded], world_size, timeout_s)
                give_up = bool(failed)
                time.sleep(_GRACE_S if failed else _POLL_S)
        finally:
            for worker in workers:
                worker.end()
        return [worker.outcome for worker in workers]


class _Worker:
    """One worker's process, seen from the caller."""

    def __init__(self, rank: int, process: BaseProcess, folder: Path):
        self.rank, self.process, self.folder = rank, process, folder
        self.log = (folder / f"log-{rank}").open("rb")
        self.alive, self.received = True, 0
        self.kind, self.outcome = "", None  # at the end ("result" | "error", what)

    @property
    def succeeded(self) -> bool:
        return self.kind == "result"

    @property
    def failed(self) -> bool:
        return self.kind == "error" or not (self.kind or self.alive)

    def news(self) -> Iterator[Any]:
        """Print what it has printed, yield what it has sent, and note how it ended."""
        self.alive = self.process.is_alive()  # asked first: if it is dead, all that it said is here
        self.show_output()
        while not self.kind and (path := message_path(self.folder, self.rank, self.received)).exists():
            kind, what = pickle.loads(path.read_bytes())
            path.unlink()
            self.received += 1
            if kind == "sent":
                yield what
            else:
                self.kind, self.outcome = kind, what

    def show_output(self) -> None:
        """Print the lines that the worker has written since the last call."""
        for line in self.log:
            if self.alive and not line.endswith(b"\n"):  # the rest is yet to come
                self.log.seek(-len(line), os.SEEK_CUR)
                break
            text = line.decode(errors="replace").rstrip()
            if not text.startswith("[Gloo] Rank"):  # some versions greet every group they connect
                print(f"[rank {self.rank}] {text}")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it for zombies
            os.killpg(self.process.pid, signal.SIGKILL)  # its children too
        self.process.kill()  # if it has no group of its own yet
        self.process.join()
        self.alive = False
        self.show_output()
        self.log.close()

    def stack(self) -> str:
        """Where it was when it crashed or ran out of time, without the thread that watches the caller."""
        path = self.folder / f"stack-{self.rank}"
        threads = path.read_text().split("\n\n") if path.exists() else []
        return "\n\n".join(thread for thread in threads if " in _end_with_caller\n" not in thread)

    def failure(self) -> tuple[tuple, str, str]:
        """How this worker ended, to find the first cause: (sort key, one sentence, details)."""
        if self.kind:
            at, summary, text = self.outcome
            return (3 if any(words in summary for words in _ECHOES) else 1, at), f"raised {summary}", text
        code = self.process.exitcode
        if code < 0:
            # Libraries abort when a peer is gone, so an abort is more often an echo than a cause.
            key = (2 if -code == signal.SIGABRT else 0, 0)
            return key, f"was ended by {signal.Signals(-code).name}", self.stack()
        return (1, 0), f"ended with exit code {code} before it returned", self.stack()


def _failure(failed: list[_Worker], world_size: int) -> WorkerError:
    failures = sorted((*worker.failure(), worker.rank) for worker in failed)
    _, sentence, details, rank = failures[0]
    echoes = "".join(f"\nAfterwards rank {other} {said}" for _, said, _, other in failures[1:])
    return WorkerError(rank, f"rank {rank} of {world_size} {sentence}\n\n{details}{echoes}".rstrip())


def _timeout(hanging: list[_Worker], world_size: int, timeout_s: float) -> WorkerError:
    ranks = ", ".join(str(worker.rank) for worker in hanging)
    stacks = "\n".join(f"rank {each.rank} was at\n{each.stack() or 'its imports'}" for each in hanging)
    sentence = f"rank {ranks} of {world_size}: not done within {timeout_s:g} s"
    return WorkerError(hanging[0].rank, f"{sentence}\n\n{stacks}".rstrip())
