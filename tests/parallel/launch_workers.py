"""Workers for test_launch.py: some behave, the others fail in every way a worker can."""

import os
import random
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist


def report(context, *args, size=0, lines=0, **kwargs):
    warnings.warn("careful", stacklevel=1)
    print(*range(lines), sep="\n")
    os.write(1, b"native words, no newline")
    total = torch.ones(1, device=context.device)
    dist.all_reduce(total)
    of_context = (context.rank, context.world_size, context.backend, str(context.device))
    environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NCCL_NVLS_ENABLE")}
    return of_context, args, kwargs, total, environment, os.getpid(), bytes(size)


def count(context, numbers):
    """Rank 0 sends 0, 1, ...; in between the ranks wait for each other."""
    for number in range(numbers):
        context.send((context.rank, number, time.time()))
        dist.barrier()
        time.sleep(0.3)


def fail_on(context, rank, how):
    """Rank `rank` fails in the way named; the others wait for it in a collective."""
    if context.rank == rank:
        FAILURES[how]()
    dist.barrier()


def _raise():
    error = KeyError("the culprit")
    error.add_note("and what it was at")
    raise error


def _leave_children_and_hang():
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid)
    time.sleep(300)


FAILURES = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "vanish": lambda: os._exit(0),
    "hang": _leave_children_and_hang,
}


def call_and_hang(context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    print(os.getpid(), child.pid)
    time.sleep(300)


def report_ranks(context, offset):
    context.send({"case": 1})
    context.send({"no JSON": torch.float32})
    ranks = [None] * context.world_size
    dist.all_gather_object(ranks, [context.rank + offset, context.local_rank])
    return ranks


def draw(context):
    return torch.rand(1).item(), np.random.rand(), random.random()
