"""Data parallelism that leaves each rank the mean gradients of its shard of the optimizer, and no others."""

import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.ddp import REDUCE_SCATTER, AllReduceMean
from cs336_systems.parallel.overlapped import BucketedDDP
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer


class ReduceScatterMean(AllReduceMean):
    """A reduce-scatter in flight: after `wait()`, this rank's segment of the tensor holds the mean."""

    def _send(self, tensor: Tensor, operation: dist.ReduceOp) -> dist.Work:
        own = tensor.chunk(dist.get_world_size())[dist.get_rank()]
        return getattr(dist, REDUCE_SCATTER)(own, tensor, op=operation, async_op=True)


class ReduceScatterDDP(BucketedDDP):
    """ZeRO stage 1 as in the paper (Rajbhandari et al. 2020, section 5.1): a rank gets what it updates with.

    Next to a ShardedOptimizer an all-reduce sends too much: a rank uses the mean gradients of its own shard.
    A reduce-scatter sends half as much; the all-gather of the updated parameters is the other half.

        optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
        model = ReduceScatterDDP(module, optimizer)

    Afterwards a gradient is there on the rank that owns its parameter. On the others it is None, so what
    looks at all gradients sees a shard of them; if one is not finite, each rank has a NaN, so that a
    GradScaler skips the step on all. Of the backward passes before a step all but the last one run under
    `no_sync()`. Clear the gradients after every step: what is left, on its owner alone, would be averaged
    with zeros.

    Args:
        optimizer: has all trainable parameters of the module.
        bucket_size_mb: as in BucketedDDP. Padding makes the segments of the ranks equal: up to 4 % of the
            gradients of the handout's sizes on two ranks, and more if buckets are smaller.

    Raises:
        ValueError: as BucketedDDP, and where a trainable parameter is not the optimizer's.
        RuntimeError: in backward, a second pass without `no_sync()`.
    """

    _mean_of, _keeps_shards, _open_buckets = ReduceScatterMean, True, 3

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer, bucket_size_mb: float = 256):
        self._optimizer = optimizer
        super().__init__(module, bucket_size_mb)

    def _check_module(self) -> None:
        super()._check_module()
        self._owners = [self._optimizer.owner(parameter) for parameter in self._trainable]
        self._ranks = dist.get_world_size()

    def _average_gradients(self) -> None:
        super()._average_gradients()
        for parameter, owner in zip(self._trainable, self._owners, strict=True):
            if owner != dist.get_rank():
                parameter.grad = None
