"""A worker in a module that is quick to import: its test counts the seconds."""

import torch
from torch import nn

from cs336_systems.parallel import BucketedDDP


def one_rank_forgets(context):
    """All ranks run backward, and rank 0 alone asks for the means."""
    model = BucketedDDP(nn.Linear(4, 2, device=context.device), bucket_size_mb=1)
    model(torch.ones(3, 4, device=context.device)).sum().backward()
    if context.rank == 0:
        model.finish_gradient_synchronization()
        if context.device.type == "cuda":  # until here the CPU has not waited
            torch.cuda.synchronize(context.device)
