"""What FSDP and ReduceScatterDDP share: of the mean gradients each rank keeps its shard."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cs336_systems.parallel.ddp import DataParallel


class ShardedGradients(DataParallel):
    """If a gradient is infinite or NaN on one rank, every rank has a NaN: a GradScaler skips the step on all.

    It comes into every gradient that a rank has; where that makes no CPU wait, into those that it lacks, too.
    """

    def _settle(self) -> None:
        gradients = [parameter.grad for parameter in self._trainable]
        shards = [each for each in gradients if each is not None and each.numel()]
        used = self._used_here()
        # One message for both: a start costs more than its bytes.
        flags = torch.cat((used, _is_any_not_finite(shards, like=used)))
        self._all_reduce_flags(flags)
        _add_nan(shards, where=flags[-1])
        if not flags.is_cuda and flags[-1]:
            for parameter in self._trainable:
                if parameter.grad is None:
                    parameter.grad = torch.full_like(parameter, torch.nan)


def _is_any_not_finite(shards: Sequence[Tensor], like: Tensor) -> Tensor:
    """(1,): whether an element of this rank is infinite or NaN; nobody waits for the answer."""
    if not shards:
        return like.new_zeros(1)
    largest = torch.stack(torch._foreach_norm(shards, torch.inf))
    return largest.isfinite().all().logical_not().view(1)


def _add_nan(shards: Sequence[Tensor], where: Tensor) -> None:
    """To the first element of each, if the flag is set; on a GPU without reading it."""
    if shards:
        nan = torch.where(where.bool(), torch.nan, 0.0)
        # as_strided is a view of any layout, where flatten() may copy.
        first_elements = [shard.as_strided((), ()) for shard in shards]
        torch._foreach_add_(first_elements, nan)
