"""The worker's side of a launch: join the others, run one function, leave its result or error in a file."""

import faulthandler
import importlib
import os
import pickle
import signal
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

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class WorkerContext:
    """Which worker this is, of how many, and its device: the first argument of every worker function."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


def choose_backend(backend: str, local_workers: int) -> str:
    """Resolve "auto": NCCL where every worker of this machine gets its own GPU, else Gloo on the CPU.

    Raises:
        ValueError: an unknown backend, or NCCL with more workers than GPUs.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    reason = why_no_nccl(local_workers)
    if backend == "nccl" and reason:
        raise ValueError(f"{reason}; allowed: fewer workers, or backend 'gloo'")
    if backend == "auto":
        return "gloo" if reason else "nccl"
    return backend


def why_no_nccl(local_workers: int) -> str:
    """Why this machine cannot run so many workers over NCCL; empty if it can."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if gpus >= local_workers:
        return ""
    return f"backend 'nccl' gives each of the {local_workers} workers a GPU and this machine has {gpus}"


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
        print(f"world size {world_size}: {used} ({reason})" if reason else f"world size {world_size}: {used}")
    return chosen


def join(backend: str = "auto", *, init_method: str = "env://", timeout_s: float = 600.0) -> WorkerContext:
    """Enter the process group that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE describe.

    `torchrun` sets these variables, and so does `launch`; a worker cannot tell the two apart.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_workers = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
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
    return WorkerContext(rank, world_size, local_rank, device, backend)


def find_worker(address: str) -> Callable[..., Any]:
    """Import the function at "package.module:name".

    Raises:
        ValueError: no colon, no such module, or no such function in it.
    """
    module_name, colon, name = address.partition(":")
    if not colon:
        raise ValueError(f"worker {address!r} is no address; allowed: package.module:function")
    try:
        worker = importlib.import_module(module_name)
        for part in name.split("."):
            worker = getattr(worker, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"worker {address!r} cannot be imported: {error}") from error
    return worker


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see complete or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.rename(path)


def _end_with_parent() -> None:
    """End this process and its children when the caller, dying, lets go of our standard input."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _load_arguments(pickled: bytes) -> tuple[tuple, dict]:
    try:
        return pickle.loads(pickled)
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"the arguments cannot be rebuilt in the worker: {error}; "
            "allowed: values whose classes and functions can be imported, not those of a notebook or script"
        ) from error


def _describe(error: BaseException) -> dict[str, Any]:
    """What the caller is told: when, in one line, and the traceback without this file's own frames."""
    whole = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in whole.stack if frame.filename != __file__]
    whole.stack = traceback.StackSummary.from_list(frames)
    return {
        "at": time.time(),
        "summary": traceback.format_exception_only(error)[-1].strip(),
        "traceback": "".join(whole.format()),
    }


def _run(job: dict[str, Any]) -> bytes:
    worker = find_worker(job["worker"])
    args, kwargs = _load_arguments(job["arguments"])
    context = join(job["backend"], init_method=job["init_method"], timeout_s=job["timeout_s"])
    result = worker(context, *args, **kwargs)
    try:
        pickled = pickle.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"the worker's result, a {kind}, cannot be sent back: {error}") from error
    dist.destroy_process_group()
    return pickled


def main(folder: Path, rank: int) -> None:
    """Run the job that `launch` described in `folder` as this rank, and end the process."""
    _end_with_parent()
    stacks = (folder / f"stack-{rank}").open("w")
    faulthandler.enable(stacks)  # a crash in native code leaves the Python stack
    faulthandler.register(signal.SIGUSR1, stacks)  # `launch` asks a hanging worker where it is
    try:
        outcome, content = "result", _run(pickle.loads((folder / "job").read_bytes()))
    except BaseException as error:
        outcome, content = "error", pickle.dumps(_describe(error))
    write_whole(folder / f"{outcome}-{rank}", content)
    sys.stdout.flush()
    sys.stderr.flush()
    # No orderly exit: after an error, the libraries' shutdown may wait for other workers.
    os._exit(0 if outcome == "result" else 1)
