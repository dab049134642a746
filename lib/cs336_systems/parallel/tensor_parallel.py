"""Tensor parallelism of a SwiGLU layer: each rank has a slice of its width, and two all-reduces join them.

Shoeybi et al. 2019 (Megatron-LM), section 3: w1 and w3 are cut by output features ("column parallel"), and w2
by input features ("row parallel"): each rank holds a term of the output, and an all-reduce adds them up.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from cs336_systems.parallel.guards import watch_parts


class _Sum(torch.autograd.Function):
    """Adds up what the ranks have: in forward terms of a result, in backward gradients through their slices.

    in_forward: add up in forward, and hand gradients on as they are; else hand on in forward, and add up
    gradients. Either is the backward of the other, so second derivatives are right as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, in_forward: bool) -> Tensor:
        ctx.group = group
        ctx.in_forward = in_forward
        if not in_forward:
            return x.view_as(x)
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad, ctx.group, not ctx.in_forward), None, None


class TensorParallelSwiGLU(nn.Module):
    """This rank's slice of a SwiGLU layer; its output and the gradient of its input are those of the whole.

    A slice is not the weight: torch's `clip_grad_norm_` scales by the norm of the slices alone, so that each
    rank scales otherwise; a norm over all weights takes an all-reduce of the squares. Data-parallel wrappers
    refuse slices, as they would give every rank those of rank 0.

    Args:
        full: a model.SwiGLU, with the same weights on every rank of the group.
        group: the ranks that share it; by default all. Every rank gives the layer the same input.

    Attributes:
        w1, w3: (d_ff / n, d_model), this rank's rows of the layer's.
        w2: (d_model, d_ff / n), this rank's columns of the layer's.

    Raises:
        ValueError: the group cannot share d_ff evenly.
    """

    def __init__(self, full: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.group = group
        rank = dist.get_rank(group)
        ranks = dist.get_world_size(group)
        d_ff = full.w1.weight.shape[0]
        if d_ff % ranks:
            raise ValueError(
                f"d_ff is {d_ff}; allowed: a multiple of {ranks}, the ranks that share it"
            )
        for name, dimension in (("w1", 0), ("w2", 1), ("w3", 0)):
            whole = getattr(full, name).weight
            shard = whole.detach().chunk(ranks, dimension)[rank]
            # A copy: as a view it would keep the whole weight.
            weight = shard.clone(memory_format=torch.contiguous_format)
            setattr(self, name, nn.Parameter(weight, requires_grad=whole.requires_grad))
        watch_parts(self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., d_model), the same on every rank, as is what comes out."""
        # Of x the gradients are summed, in backward; of the result the terms, here.
        x = _Sum.apply(x, self.group, False)
        hidden = F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3)
        return _Sum.apply(F.linear(hidden, self.w2), self.group, True)
