"""A worker in a module that is quick to import: its test counts the seconds."""

import torch
from torch import nn


def one_rank_forgets(context, wrapper, options):
    """All ranks run backward, and rank 0 alone asks for the means."""
    model = wrapper(nn.Linear(4, 2, device=context.device), **options)
    model(torch.ones(3, 4, device=context.device)).sum().backward()
    if context.rank == 0:
        model.finish_gradient_synchronization()
        if context.device.type == "cuda":  # until here the CPU has not waited
            torch.cuda.synchronize(context.device)
