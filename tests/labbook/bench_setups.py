"""Set-ups that worker processes import."""

import torch
import torch.distributed as dist

from labbook.bench import Step


def all_reduce(case, context):
    """An all-reduce; where the case says so, one rank runs out of memory and the other waits for it."""
    x = torch.ones(case.num_rows)

    def run():
        if context.rank == 1 and case.num_rows == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if context.rank == 1 and case.num_rows == 3:
            raise KeyError("a bug of rank 1")
        dist.all_reduce(x)

    return {"forward": Step(run, values=lambda: {"total": x.sum().item() > 0})}
