"""Data parallelism next to a ShardedOptimizer: each rank gets the mean gradients that it updates with."""

import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.ddp import REDUCE_SCATTER, ready_for_mean
from cs336_systems.parallel.overlapped import BucketedDDP
from cs336_systems.parallel.sharded_gradients import ShardedGradients
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer
from cs336_systems.parallel.shards import Segments, fill_buckets


def start_mean_of_shards(bucket: Tensor, backend: str) -> dist.Work:
    """As `start_mean`, of the bucket's equal segments, one for each rank; only this rank's gets its mean.

    A reduce-scatter, which sends half as much as an all-reduce.
    """
    operation = ready_for_mean([bucket], backend)
    shard = bucket.chunk(dist.get_world_size())[dist.get_rank()]
    return getattr(dist, REDUCE_SCATTER)(shard, bucket, op=operation, async_op=True)


class ReduceScatterDDP(ShardedGradients, BucketedDDP):
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

    _start_reduction = staticmethod(start_mean_of_shards)

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer, bucket_size_mb: float = 256):
        self._optimizer = optimizer
        # Of each trainable parameter the rank.
        self._owners = [optimizer.owner(p) for p in module.parameters() if p.requires_grad]
        super().__init__(module, bucket_size_mb)

    def _fill(self, order: list[int]) -> list[list[int]]:
        segment_bytes = self._bucket_bytes / dist.get_world_size()
        return fill_buckets(self._trainable, order, segment_bytes, self._owners)

    def _segments(self, bucket: list[int]) -> Segments:
        """Of each rank, what it owns."""
        segments: Segments = [[] for _ in range(dist.get_world_size())]
        for index in bucket:
            segments[self._owners[index]].append(self._trainable[index])
        return segments

    def _begin_another_pass(self) -> None:
        raise RuntimeError(
            "a second backward pass before finish_gradient_synchronization(); allowed: all but the "
            "last one under no_sync(), as half-reduced gradients cannot be added to"
        )

    def _average_gradients(self) -> None:
        rank = dist.get_rank()
        pairs = zip(self._trainable, self._owners, strict=True)
        present = {owner for parameter, owner in pairs if parameter.grad is not None}
        if present == {rank} and not self._ready and self._observed is None:
            raise RuntimeError(
                "there are only the means that an earlier finish_gradient_synchronization() has left; "
                "allowed: zero_grad(), backward, then once"
            )
        super()._average_gradients()
        for parameter, owner in zip(self._trainable, self._owners, strict=True):
            if owner != rank:
                parameter.grad = None
