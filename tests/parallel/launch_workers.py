"""Workers for the tests of `launch`: one behaves, the others fail in every way a worker can."""

import os
import signal
import subprocess
import sys
import time
import warnings

import torch
import torch.distributed as dist

from cs336_systems.bench.collectives_bench import time_collectives, time_together
from cs336_systems.checks.ddp_checks import run_cases


def report(context, *args, **kwargs):
    total = torch.ones(1, device=context.device)
    dist.all_reduce(total)
    environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NCCL_NVLS_ENABLE")}
    return context, args, kwargs, total.item(), environment, os.getpid()


def talk(context):
    print("hello")
    warnings.warn("careful", stacklevel=1)
    os.write(1, b"native words, no newline")


def talk_much(context, lines):
    print(*(f"{number} {'.' * 90}" for number in range(lines)), sep="\n")


def fail_on(context, rank, how):
    """Rank `rank` fails in the way named; the others wait for it in a collective."""
    if context.rank == rank:
        FAILURES[how]()
    dist.barrier()


def return_a_lambda(context):
    return lambda: None


def _raise():
    raise KeyError("the culprit")


def _leave_children_and_hang():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    time.sleep(300)


FAILURES = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "vanish": lambda: os._exit(0),
    "hang": _leave_children_and_hang,
}


def call_and_hang(context):
    print("here")
    time.sleep(300)


def report_ranks(context, offset):
    ranks = [None] * context.world_size
    dist.all_gather_object(ranks, [context.rank + offset, context.local_rank])
    return ranks


def check_each(context, classes):
    """What run_cases says about each class."""
    return {name: run_cases(context, pickled, thorough=False) for name, pickled in classes.items()}


def time_collectives_strictly(context, **options):
    warnings.simplefilter("error")
    return time_collectives(context, warmup_steps=1, **options)


def time_naps(context):
    """Rank 0 naps for 10 ms, rank 1 for 20 ms; three naps a step."""
    nap = 0.01 * (1 + context.rank)
    return time_together(lambda: time.sleep(nap), context, warmup_steps=1, steps=2, calls=3).step_ms
