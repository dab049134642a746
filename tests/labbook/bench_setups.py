"""Set-ups that worker processes import."""

import time

import torch
import torch.distributed as dist

from labbook.bench import Step


def all_reduce(case, context):
    """An all-reduce; where the case says so, one rank runs out of memory and the other waits for it."""
    x = torch.ones(case.num_rows)

    def run():
        if context.rank == 1 and case.num_rows == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        dist.all_reduce(x)

    return {"forward": Step(run, values=lambda: {"total": x.sum().item() > 0})}


def naps(case, context):
    """Rank 0 naps for 10 ms, rank 1 for 20 ms; three naps in a row."""
    nap_s = 0.01 * (1 + context.rank)
    together = {"calls": 3, "limit_s": case.limit_s}
    also = {"nap_ms": Step(time.sleep, prepare=lambda: nap_s)}
    return {"": Step(lambda: time.sleep(nap_s), also=also, together=together)}
