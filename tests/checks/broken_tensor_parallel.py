"""Tensor-parallel SwiGLU layers with one classic mistake each."""

import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cs336_systems.parallel.tensor_parallel import TensorParallelSwiGLU, _Sum, _SumGradient


class _SumBothWays(_Sum):
    """What torch.distributed.nn's all_reduce does."""

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total, None


class Parts(TensorParallelSwiGLU):
    """The layer in parts that can go wrong one by one."""

    def enter(self, x):
        return _SumGradient.apply(x, self.group)

    def leave(self, term):
        return _Sum.apply(term, self.group)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(F.linear(F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3), self.w2))


class ForgetsToSum(Parts):
    def leave(self, term):
        return term


class Averages(Parts):
    def leave(self, term):
        return super().leave(term) / dist.get_world_size()


class ForgetsTheInputGradient(Parts):
    def enter(self, x):
        return x


class SumsBothWays(Parts):
    def leave(self, term):
        return _SumBothWays.apply(term, self.group)


class SumsOutsideAutograd(Parts):
    def leave(self, term):
        total = term.detach()
        dist.all_reduce(total)
        return total.requires_grad_()


class CutsW2ByRows(Parts):
    def __init__(self, full, group):
        super().__init__(full, group)
        rows = full.w2.weight.detach().chunk(dist.get_world_size(), 0)
        self.w2 = nn.Parameter(rows[dist.get_rank()])


class EveryoneTakesTheFirstSlice(Parts):
    def __init__(self, full, group):
        super().__init__(full, group)
        self.w3 = nn.Parameter(full.w3.weight.detach().chunk(dist.get_world_size(), 0)[0])


class KeepsTheSlicesElsewhere(Parts):
    def __init__(self, full, group):
        super().__init__(full, group)
        self.gate, self.w1 = self.w1, None
