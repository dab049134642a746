"""Start n workers in new processes and return their results, or raise the first error; no process stays.

    losses = launch(train, 4, config, steps=10)        # train(context, config, steps=10) in each of 4
    for row in stream(measure, 4, sizes): ...          # what rank 0 hands to context.send, as it comes

What an importable module defines is imported by each worker; what a notebook or a script defines goes to it
by value (cloudpickle). The same worker runs on several machines under `torchrun -m cs336_systems.parallel`.
On Linux without a GPU they are forks of a server that has imported torch once and ends with the caller.
(torch.multiprocessing and torch's elastic agent have no time limit, and report the dead process seen first.)
"""

import contextlib
import faulthandler
import math
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
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from cs336_systems.arguments import check_choice

BACKENDS = ("auto", "gloo", "nccl")
# Nothing of ours: it may be edited while the server lives.
_PRELOADED = ["torch.distributed.fsdp", "pandas", "einops", "cloudpickle"]
_LINUX = sys.platform == "linux"
_POLL_S = 0.02
# What is left when the time is up or a worker has failed: for stacks, and for failures that this one causes.
_GRACE_S = 0.5
_starting = threading.Lock()


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
    """The message has the traceback; `cause` ("Type: message") is that of the first failure."""

    def __init__(self, message: str, cause: str = ""):
        super().__init__(message)
        self.cause = cause


def choose_backend(backend: str, local_workers: int) -> str:
    """Resolve "auto": NCCL where every worker of this machine gets its own GPU, else Gloo on the CPU.

    Raises ValueError for an unknown backend, and for NCCL with more workers than GPUs.
    """
    check_choice("backend", backend, BACKENDS)
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if backend == "auto":
        return "nccl" if gpus >= local_workers else "gloo"
    if backend == "nccl" and gpus < local_workers:
        raise ValueError(
            f"backend 'nccl' needs {local_workers} GPUs, one a worker; this machine has {gpus}"
        )
    return backend


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
    Gloo each computes on one thread (OMP_NUM_THREADS=1), as they share the CPU. Random numbers (torch, NumPy,
    Python) differ by rank and by launch; to repeat them, the worker sets a seed.

    Args:
        backend: "gloo" (CPU), "nccl" (one GPU each), or "auto": NCCL where there are enough GPUs, else Gloo.
        timeout_s: seconds after which the run counts as hanging.

    Returns:
        The workers' results, by rank.

    Raises:
        WorkerError: a worker raised, died, or was not done in time. All workers are gone by then.
        ValueError: world_size, backend or timeout_s is not possible here.
        TypeError: the worker or an argument cannot be pickled.
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
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; allowed: a whole number, 1 or more")
    if not 0 < timeout_s < threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s is {timeout_s!r}; allowed: seconds, more than 0")
    backend = choose_backend(backend, world_size)
    deadline = time.monotonic() + timeout_s
    try:
        call = cloudpickle.dumps((worker, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"the worker or its arguments cannot be sent to other processes: {error}"
        ) from error
    # From here on a worker is a process; the function is in `call`.
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="cs336-launch-") as folder:
        job = _Job(call, world_size, backend, deadline, Path(folder), dict(os.environ))
        try:
            for rank in range(world_size):
                workers.append(_Worker(rank, job))
            yield from _news_of_all(workers, deadline, timeout_s)
        finally:
            for worker in workers:
                worker.end()
    return [worker.outcome for worker in workers]


@dataclass(frozen=True)
class _Job:
    """What all workers of a launch are told. Their messages, output and stacks are files in the folder."""

    call: bytes  # the pickled function, args, kwargs
    world_size: int
    backend: str
    deadline: float  # of time.monotonic(), which the processes of a machine share
    folder: Path
    environment: dict[str, str]


def _news_of_all(workers: list["_Worker"], deadline: float, timeout_s: float) -> Iterator[Any]:
    """Yield what is sent until all workers have a result.

    Raises WorkerError: one failed, and those that it makes fail have had the time to; or the time is up.
    """
    while True:
        for worker in workers:
            yield from worker.news()
        running = [worker for worker in workers if worker.state == "runs"]
        failed = [worker for worker in workers if worker.state in ("error", "died")]
        if not running and not failed:
            return
        if failed:
            # From the first failure on: only the grace is left.
            deadline = min(deadline, time.monotonic())
        is_over = not running or time.monotonic() > deadline + _GRACE_S
        if is_over and failed:
            _, rank, how, details = min(worker.failure() for worker in failed)
            message = f"rank {rank} of {len(workers)} {how}\n\n{details}"
            raise WorkerError(message.rstrip(), how.removeprefix("raised "))
        if is_over:
            raise _timeout(running, timeout_s)
        time.sleep(_POLL_S)


class _Worker:
    """One worker's process, seen from the caller; state: "runs", "result", "error" or "died"."""

    def __init__(self, rank: int, job: _Job):
        self.rank = rank
        self.folder = job.folder
        self.state = "runs"
        self.outcome: Any = None
        self.log = (job.folder / f"log-{rank}").open("a+b")
        self.stack = (job.folder / f"stack-{rank}").open("a+")
        self.process = _start_method().Process(target=_work, args=(rank, job))
        with _without_script():
            self.process.start()

    def news(self) -> Iterator[Any]:
        """Print what it has printed, yield what it has sent, and note how it ended."""
        # Asked first: if it is dead, all its messages are here.
        is_alive = self.process.is_alive()
        self.show_output(to_the_end=not is_alive)
        for path in sorted(self.folder.glob(f"message-{self.rank}-*")):
            state, content = pickle.loads(path.read_bytes())
            path.unlink()
            # Still: it has called `context.send`.
            if state == "runs":
                yield content
            else:
                self.state = state
                self.outcome = content
        if self.state == "runs" and not is_alive:
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
        # Its children too. macOS forbids it for zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # if it has no group of its own yet
        self.process.join()
        self.show_output(to_the_end=True)
        self.log.close()
        self.stack.close()

    def failure(self) -> tuple[float, int, str, str]:
        """(at_s, rank, how it failed, details): of several the least is what caused the others.

        at_s: of an error when it was raised; 0.0 of other ends, before all errors, infinite of an abort.
        """
        if self.state == "error":
            at_s, cause, details = self.outcome
            return at_s, self.rank, f"raised {cause}", details
        code = self.process.exitcode
        end = signal.Signals(-code).name if code < 0 else f"exit code {code} before it returned"
        # A worker that is killed lets others fail; libraries abort when another is gone.
        at_s = math.inf if end == "SIGABRT" else 0.0
        return at_s, self.rank, f"ended with {end}", self.stack.read()


def _start_method() -> BaseContext:
    # A fork could not use a GPU that its parent has looked for; a longer TMPDIR is no path for a socket.
    can_fork = not torch.cuda.is_available() and len(tempfile.gettempdir()) < 75
    context = multiprocessing.get_context("forkserver" if can_fork and _LINUX else "spawn")
    context.set_forkserver_preload(_PRELOADED)
    return context


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Hide the caller's script: a new process would run it again."""
    with _starting:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script


def _timeout(hanging: list[_Worker], timeout_s: float) -> WorkerError:
    cause = f"not done within {timeout_s:g} s"
    ranks = ", ".join(str(worker.rank) for worker in hanging)
    stacks = "".join(f"\n\nrank {worker.rank} was at\n{worker.stack.read()}" for worker in hanging)
    return WorkerError(f"rank {ranks}: {cause}{stacks}", cause)


def _work(rank: int, job: _Job) -> None:
    """In the worker's process: run the job's call, report its result or error, end."""
    _settle(rank, job)
    left_s = max(0.1, job.deadline - time.monotonic())
    # A crash in native code leaves the Python stack, and so does the time limit.
    stacks = (job.folder / f"stack-{rank}").open("w")
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(left_s, file=stacks)

    def report(state: str, content: Any) -> None:
        # Renamed when it is whole, so that the caller reads no half of it.
        incomplete = job.folder / f"incomplete-{rank}"
        incomplete.write_bytes(cloudpickle.dumps((state, content)))
        incomplete.rename(job.folder / f"message-{rank}-{time.monotonic_ns():020}")

    try:
        if job.backend == "gloo":
            _share_cpu()
        worker, args, kwargs = pickle.loads(job.call)
        # Needs no port.
        store = dist.FileStore(str(job.folder / "rendezvous"), job.world_size)
        # Its collectives wait longer than the caller, who can say more: the caller has all ranks' stacks.
        context = join(job.backend, partial(report, "runs"), timeout_s=left_s + 10, store=store)
        result = worker(context, *args, **kwargs)
        dist.destroy_process_group()
        report("result", result)
    except BaseException as error:
        lines = traceback.format_exception_only(error)  # SyntaxError: location first, notes last
        summary = next(line for line in lines if not line.startswith(" ")).strip()
        report("error", (time.monotonic(), summary, traceback.format_exc()))
    sys.stdout.flush()
    # No orderly exit: after an error, the libraries' shutdown may wait for other workers.
    os._exit(0)


def _settle(rank: int, job: _Job) -> None:
    """Give this process the caller's environment and its rank, a group of its own, and a log for output."""
    # Cleared first: a fork has the environment of its server.
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.world_size)))
    # What it starts ends with its group, and Ctrl-C reaches only the caller.
    os.setsid()
    threading.Thread(target=_end_with_caller, daemon=True).start()
    log = os.open(job.folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):  # of native code, too
        os.dup2(log, descriptor)
    sys.stdout.reconfigure(line_buffering=True)


def _share_cpu() -> None:
    """All workers are on the CPU of this machine."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # The machine's name may lead nowhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if _LINUX else "lo0")


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
    # torch begins with one seed in every process, and a fork has NumPy's state of its server. (Python's
    # own numbers begin anew in each.)
    np.random.seed(torch.seed() % 2**32)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world_size, local_rank, local_workers = (int(os.environ[name]) for name in names)
    backend = choose_backend(backend, local_workers)
    device = torch.device("cpu")
    options = {}
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_s),
        world_size=world_size,
        rank=rank,
        store=store,
        **options,
    )
    if backend == "gloo":
        # Or a worker that is done at once would cut off those that are still connecting.
        dist.barrier()
    arriving = send if rank == 0 else lambda message: None
    return WorkerContext(rank, world_size, local_rank, device, backend, arriving)
