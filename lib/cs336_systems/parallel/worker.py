"""A worker's side of `launch`: join the process group, run one function, tell the caller what came of it."""

import faulthandler
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.names import check_choice

BACKENDS = ("auto", "gloo", "nccl")


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


def why_no_nccl(local_workers: int) -> str:
    """Why this machine cannot run so many workers over NCCL; empty if it can."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if gpus >= local_workers:
        return ""
    return f"backend 'nccl' gives each of the {local_workers} workers a GPU and this machine has {gpus}"


def choose_backend(backend: str, local_workers: int) -> str:
    """Resolve "auto": NCCL where every worker of this machine gets its own GPU, else Gloo on the CPU.

    Raises:
        ValueError: an unknown backend, or NCCL with more workers than GPUs.
    """
    check_choice("backend", backend, BACKENDS)
    reason = why_no_nccl(local_workers)
    if backend == "nccl" and reason:
        raise ValueError(f"{reason}; allowed: fewer workers, or backend 'gloo'")
    return ("gloo" if reason else "nccl") if backend == "auto" else backend


def backends_here(backend: str, world_sizes: Iterable[int]) -> dict[int, str]:
    """Choose for each number of workers, leave out those that cannot run here, and print what came of each.

    For notebooks, which had better skip what needs more GPUs than to end with its error.

    Raises:
        ValueError: an unknown backend.
    """
    chosen = {}
    for world_size in world_sizes:
        reason = "" if backend == "gloo" else why_no_nccl(world_size)
        if backend != "nccl" or not reason:
            chosen[world_size] = choose_backend(backend, world_size)
        used = chosen.get(world_size, "not possible here")
        print(f"world size {world_size}: {used}" + f" ({reason})" * bool(reason))
    return chosen


def join(
    backend: str, *, send: Callable[[Any], None], timeout_s: float, init_method: str = "env://"
) -> WorkerContext:
    """Enter the process group that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE describe.

    `torchrun` sets these variables, and so does `launch`; a worker cannot tell the two apart.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world_size, local_rank, local_workers = (int(os.environ[name]) for name in names)
    backend = choose_backend(backend, local_workers)
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    if backend == "gloo":
        dist.barrier()  # or who is done at once would cut off those that are still connecting
    return WorkerContext(rank, world_size, local_rank, device, backend, send if rank == 0 else lambda _: None)


def find_worker(address: str) -> Callable[..., Any]:
    """Import the function at "package.module:name".

    Raises:
        ValueError: no colon, no such module, or no such function in it.
    """
    module_name, colon, name = address.partition(":")
    if not colon:
        raise ValueError(f"worker {address!r} is no address; allowed: package.module:function")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"worker {address!r} cannot be imported: {error}") from error


@dataclass(frozen=True)
class Job:
    """What `launch` asks of its workers: `call` is pickled (args, kwargs), `deadline` by time.monotonic()."""

    address: str
    call: bytes
    world_size: int
    backend: str
    timeout_s: float
    deadline: float
    folder: Path
    environment: dict[str, str]  # the caller's; a fork has that of its server


def message_path(folder: Path, rank: int, number: int) -> Path:
    """Where a worker leaves what it tells the caller: pickled ("sent" | "result" | "error", what)."""
    return folder / f"message-{rank}-{number}"


def main(rank: int, job: Job) -> None:
    """Run a job as this rank, tell the caller what comes of it, and end the process."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.setsid()  # a process group of its own: what the worker starts ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch's way to end with the caller; the thread's is surer
    threading.Thread(target=_end_with_caller, daemon=True).start()
    log = os.open(job.folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    stacks = (job.folder / f"stack-{rank}").open("w")
    faulthandler.enable(stacks)  # a crash in native code leaves the Python stack, and so does the time limit
    faulthandler.dump_traceback_later(max(0.1, job.deadline - time.monotonic()), file=stacks)

    paths = (message_path(job.folder, rank, number) for number in itertools.count())

    def tell(kind: str, what: Any) -> None:
        message, path = pickle.dumps((kind, what)), job.folder / f"partial-{rank}"
        path.write_bytes(message)
        path.rename(next(paths))  # what is there is whole, whenever this process dies

    try:
        tell("result", _run(rank, job, lambda what: tell("sent", what)))
    except BaseException as error:
        lines = traceback.format_exception_only(error)  # of a SyntaxError the place comes first, notes last
        summary = next(line for line in lines if not line.startswith(" ")).strip()
        tell("error", (time.monotonic(), summary, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # no orderly exit: after an error, the libraries' shutdown may wait for other workers


def _end_with_caller() -> None:
    """End this process and its children when the caller is gone, however it ended."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _run(rank: int, job: Job, send: Callable[[Any], None]) -> Any:
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.world_size))
    if job.backend == "gloo":  # the workers share the CPU
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        # All are on this machine; Gloo would look up the host's name, which may lead nowhere.
        for _, name in socket.if_nameindex():
            if name in ("lo", "lo0"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    worker = find_worker(job.address)
    args, kwargs = pickle.loads(job.call)
    # They meet in a file of their own: there is no port to clash over. Whoever waits in vain in a collective
    # hears of it after the caller, who can say more.
    patience_s = job.timeout_s + 10
    context = join(
        job.backend, send=send, timeout_s=patience_s, init_method=f"file://{job.folder / 'rendezvous'}"
    )
    result = worker(context, *args, **kwargs)
    dist.destroy_process_group()
    return result
