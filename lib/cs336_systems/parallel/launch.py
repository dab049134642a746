"""Start n workers in new processes and return their results, or raise the first error; no process stays.

    losses = launch(train, 4, config, steps=10)        # train(context, config, steps=10) in each of 4
    for row in stream(measure, 4, sizes): ...          # what rank 0 hands to context.send, as it comes

What an importable module defines is imported by each worker; what a notebook or a script defines goes to it
by value (cloudpickle). The same worker runs on several machines under `torchrun -m cs336_systems.parallel`.
Without a GPU the workers are forks of a server that has imported torch once and ends with the caller.
(torch.multiprocessing and torch's elastic agent have no time limit, and report the dead process seen first.)
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from cs336_systems.arguments import check_choice

BACKENDS = ("auto", "gloo", "nccl")
_PRELOADED = [
    "torch.distributed.fsdp",
    "pandas",
    "einops",
    "cloudpickle",
]  # not ours: it may be edited
_POLL_S, _GRACE_S = 0.02, 0.5  # grace: to write stacks, and for failures that one causes
_CONSEQUENCES = (
    "by peer",
    "remote process exited",
)  # what Gloo and NCCL raise when another worker is gone
_LINUX, _starting = sys.platform == "linux", threading.Lock()


@dataclass(frozen=True)
class WorkerContext:
    """Which worker this is, of how many, and its device: the first argument of every worker function.

    `send(obj)` hands any picklable object to the caller at once; only those of rank 0 arrive (see `stream`).
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    send: Callable[[Any], None]


class WorkerError(RuntimeError):
    """The message has the traceback; `rank` and `cause` ("Type: message") are of the first failure."""

    def __init__(self, message: str, rank: int = -1, cause: str = ""):
        super().__init__(message)
        self.rank, self.cause = rank, cause


def choose_backend(backend: str, local_workers: int) -> str:
    """Resolve "auto": NCCL where every worker of this machine gets its own GPU, else Gloo on the CPU.

    Raises ValueError for an unknown backend, and for NCCL with more workers than GPUs.
    """
    check_choice("backend", backend, BACKENDS)
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if backend == "nccl" and gpus < local_workers:
        raise ValueError(
            f"backend 'nccl' needs {local_workers} GPUs, one a worker; this machine has {gpus}"
        )
    return ("nccl" if gpus >= local_workers else "gloo") if backend == "auto" else backend


def backends_here(backend: str, world_sizes: Iterable[int]) -> dict[int, str]:
    """For a notebook: print and return the backend of each number of workers that can run here."""
    check_choice("backend", backend, BACKENDS)
    chosen: dict[int, str] = {}
    for world_size in world_sizes:
        try:
            chosen[world_size] = choose_backend(backend, world_size)
            print(f"world size {world_size}: {chosen[world_size]}")
        except ValueError as error:
            print(f"world size {world_size}: not possible here ({error})")
    return chosen


def launch(
    worker: Callable,
    world_size: int,
    *args: Any,
    backend: str = "auto",
    timeout_s: float = 600,
    **kwargs,
) -> list[Any]:
    """Run `worker(context, *args, **kwargs)` in `world_size` processes of one process group.

    What the workers print appears here, each line with its rank. The caller's environment reaches them; over
    Gloo each computes on one thread (OMP_NUM_THREADS=1), as they share the CPU.

    Args:
        backend: "gloo" (CPU), "nccl" (one GPU each), or "auto": NCCL where there are enough GPUs, else Gloo.
        timeout_s: seconds after which the run counts as hanging.

    Returns:
        The workers' results, by rank.

    Raises:
        WorkerError: a worker raised, died, or was not done in time. All workers are gone by then.
        ValueError: world_size, backend or timeout_s is not possible here.
        TypeError: the worker is no function, or it or an argument cannot be pickled.
    """
    sent = stream(worker, world_size, *args, backend=backend, timeout_s=timeout_s, **kwargs)
    while True:
        try:
            next(sent)
        except StopIteration as end:
            return end.value


def stream(
    worker: Callable,
    world_size: int,
    *args: Any,
    backend: str = "auto",
    timeout_s: float = 600,
    **kwargs,
) -> Generator[Any, None, list[Any]]:
    """As `launch`, and yield what rank 0 hands to `context.send`, as it comes. A loop left early ends all."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; allowed: a whole number, 1 or more")
    if not 0 < timeout_s < threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s is {timeout_s!r}; allowed: seconds, more than 0")
    if not callable(worker):
        raise TypeError(
            f"worker is {worker!r}; allowed: a function of a WorkerContext and the arguments"
        )
    backend, deadline = choose_backend(backend, world_size), time.monotonic() + timeout_s
    environment = os.environ | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    try:
        job = cloudpickle.dumps((worker, args, kwargs)), backend, deadline, environment
    except Exception as error:
        raise TypeError(
            f"the worker or its arguments cannot be sent to other processes: {error}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="cs336-launch-") as folder:
        workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                workers.append(_Worker(rank, Path(folder), *job))
            while unfinished := [worker for worker in workers if worker.state != "result"]:
                for worker in unfinished:
                    yield from worker.news()
                if failed := [worker for worker in unfinished if worker.state in ("error", "died")]:
                    deadline = min(deadline, time.monotonic())
                if len(failed) == world_size or time.monotonic() > deadline + _GRACE_S:
                    raise (
                        _first_cause(failed, world_size)
                        if failed
                        else _timeout(unfinished, timeout_s)
                    )
                time.sleep(_POLL_S)
        finally:
            for worker in workers:
                worker.end()
        return [worker.outcome for worker in workers]


class _Worker:
    """One worker's process, seen from the caller; state: "runs", "result", "error" or "died"."""

    def __init__(self, rank: int, folder: Path, *job: Any):
        self.rank, self.folder, self.state, self.outcome = rank, folder, "runs", None
        self.log, self.stack = (
            (folder / f"log-{rank}").open("a+b"),
            (folder / f"stack-{rank}").open("a+"),
        )
        # A fork could not use a GPU that its parent has looked for; a longer TMPDIR is no path for a socket.
        can_fork = not torch.cuda.is_available() and len(tempfile.gettempdir()) < 75
        context = multiprocessing.get_context("forkserver" if can_fork and _LINUX else "spawn")
        context.set_forkserver_preload(_PRELOADED)
        self.process = context.Process(target=_work, args=(rank, folder, *job))
        with _starting:  # the caller's script is hidden: a new process would run it again
            script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                self.process.start()
            finally:
                sys.modules["__main__"] = script

    def news(self) -> Iterator[Any]:
        """Print what it has printed, yield what it has sent, and note how it ended."""
        alive = self.process.is_alive()  # asked first: if it is dead, all its messages are here
        self.show_output(to_the_end=not alive)
        for path in sorted(self.folder.glob(f"message-{self.rank}-*")):
            state, what = pickle.loads(path.read_bytes())
            path.unlink()
            if state == "runs":
                yield what
            else:
                self.state, self.outcome = state, what
        if self.state == "runs" and not alive:
            self.state = "died"

    def show_output(self, to_the_end: bool) -> None:
        for line in self.log:
            if not to_the_end and not line.endswith(b"\n"):  # the rest is yet to come
                self.log.seek(-len(line), os.SEEK_CUR)
                break
            text = line.decode(errors="replace").rstrip()
            if not text.startswith("[Gloo] Rank"):  # some versions greet every group they connect
                print(f"[rank {self.rank}] {text}")

    def end(self) -> None:
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # macOS forbids it for zombies
            os.killpg(self.process.pid, signal.SIGKILL)  # its children too
        self.process.kill()  # if it has no group of its own yet
        self.process.join()
        self.show_output(to_the_end=True)
        self.log.close(), self.stack.close()

    def failure(self) -> tuple[tuple, int, str, str]:
        """How this worker ended: (order in which failures cause each other, rank, sentence, details)."""
        if self.state == "error":
            at, cause, details = self.outcome
            order = 3 if any(words in cause for words in _CONSEQUENCES) else 1
            return (order, at), self.rank, f"raised {cause}", details
        code = self.process.exitcode
        name = signal.Signals(-code).name if code < 0 else f"exit code {code} before it returned"
        # Libraries abort when a peer is gone, so an abort is more often a consequence than a cause.
        order = 1 if code >= 0 else 2 if name == "SIGABRT" else 0
        return (order, 0), self.rank, f"ended with {name}", self.stack.read()


def _first_cause(failed: list[_Worker], world_size: int) -> WorkerError:
    (_, rank, sentence, details), *others = sorted(worker.failure() for worker in failed)
    later = "".join(
        f"\nAfterwards rank {other} {consequence}" for _, other, consequence, _ in others
    )
    message = f"rank {rank} of {world_size} {sentence}\n\n{details}{later}"
    return WorkerError(message.rstrip(), rank, sentence.removeprefix("raised "))


def _timeout(hanging: list[_Worker], timeout_s: float) -> WorkerError:
    cause = f"not done within {timeout_s:g} s"
    stacks = "".join(f"\n\nrank {each.rank} was at\n{each.stack.read()}" for each in hanging)
    ranks = ", ".join(str(each.rank) for each in hanging)
    return WorkerError(f"rank {ranks}: {cause}{stacks}", hanging[0].rank, cause)


def _work(
    rank: int, folder: Path, call: bytes, backend: str, deadline: float, environment: dict
) -> None:
    """In the worker's process: run a pickled (function, args, kwargs), report its result or error, end."""
    os.environ.clear()  # a fork has the environment of its server
    os.environ.update(environment | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.setsid()  # a process group of its own: what it starts ends with it, and Ctrl-C reaches only the caller
    threading.Thread(target=_end_with_caller, daemon=True).start()
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    stacks = (folder / f"stack-{rank}").open("w")
    faulthandler.enable(
        stacks
    )  # a crash in native code leaves the Python stack, and so does the time limit
    faulthandler.dump_traceback_later(left_s := max(0.1, deadline - time.monotonic()), file=stacks)

    def tell(state: str, what: Any) -> None:
        incomplete = folder / f"incomplete-{rank}"
        incomplete.write_bytes(cloudpickle.dumps((state, what)))
        incomplete.rename(folder / f"message-{rank}-{time.monotonic_ns():020}")

    try:
        if backend == "gloo":  # all share the CPU of this machine, whose name may lead nowhere
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if _LINUX else "lo0")
        worker, args, kwargs = pickle.loads(call)
        store = dist.FileStore(
            str(folder / "rendezvous"), int(environment["WORLD_SIZE"])
        )  # needs no port
        # Its collectives wait longer than the caller, who can say more: the caller has all ranks' stacks.
        context = join(backend, send=partial(tell, "runs"), timeout_s=left_s + 10, store=store)
        result = worker(context, *args, **kwargs)
        dist.destroy_process_group()
        tell("result", result)
    except BaseException as error:
        lines = traceback.format_exception_only(error)  # SyntaxError: location first, notes last
        summary = next(line for line in lines if not line.startswith(" ")).strip()
        tell("error", (time.monotonic(), summary, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(
        0
    )  # no orderly exit: after an error, the libraries' shutdown may wait for other workers


def _end_with_caller() -> None:
    """End this process and its children when the caller is gone, however it ended."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def join(
    backend: str, send: Callable, timeout_s: float, store: dist.Store | None = None
) -> WorkerContext:
    """Enter the process group that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE describe.

    `torchrun` sets these variables, and so does `launch`; a worker cannot tell the two apart.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world_size, local_rank, local_workers = (int(os.environ[name]) for name in names)
    backend, device, options = choose_backend(backend, local_workers), torch.device("cpu"), {}
    if backend == "nccl":
        options["device_id"] = device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, None, timeout, world_size, rank, store, **options)
    if backend == "gloo":
        dist.barrier()  # or a worker that is done at once would cut off those that are still connecting
    return WorkerContext(
        rank, world_size, local_rank, device, backend, send if rank == 0 else lambda _: None
    )
