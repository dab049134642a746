"""ZeRO stage 1 as in the paper (Rajbhandari et al. 2020, section 5.1): each rank gets the gradients it needs.

Next to a ShardedOptimizer an all-reduce sends too much: a rank uses the mean gradients of its own shard. A
reduce-scatter sends half as much; the all-gather of the updated parameters is the other half.

    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    model = ReduceScatterDDP(module, optimizer)
    loss(model(inputs), targets).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.ddp import REDUCE_SCATTER, AllReduceMean, not_finite
from cs336_systems.parallel.overlapped import BucketedDDP, Buckets, in_order_of_completion
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer
from cs336_systems.parallel.shards import Segments

_OPEN_BUCKETS = 3  # that a gradient may still join: more leave less padding, and leave later


class ReduceScatterMean(AllReduceMean):
    """A reduce-scatter in flight: after `wait()`, this rank's segment of the tensor holds the mean."""

    def _send(self, tensor: Tensor, operation: dist.ReduceOp) -> dist.Work:
        own = tensor.chunk(dist.get_world_size())[dist.get_rank()]
        return getattr(dist, REDUCE_SCATTER)(own, tensor, op=operation, async_op=True)


class ReduceScatterDDP(BucketedDDP):
    """BucketedDDP for a ShardedOptimizer: afterwards a gradient is there on the rank that owns its parameter.

    On the others it is None, or NaN if it is not finite, so what looks at all gradients sees a shard of them.
    Of the backward passes before a step all but the last one run under `no_sync()`. Clear the gradients after
    every step: what is left, on its owner alone, would be averaged with zeros.

    Args:
        optimizer: has all trainable parameters of the module.
        bucket_size_mb: as in BucketedDDP. Padding makes the segments of the ranks equal: up to 4 % of the
            gradients of the handout's sizes on two ranks, and more if buckets are smaller.

    Raises:
        ValueError: as BucketedDDP, and where a trainable parameter is not the optimizer's.
        RuntimeError: in backward, a second pass without `no_sync()`.
    """

    _mean_of = ReduceScatterMean

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer, bucket_size_mb: float = 256):
        self._optimizer = optimizer
        super().__init__(module, bucket_size_mb)

    def _check_module(self) -> None:
        super()._check_module()
        self._owners = [self._optimizer.owner(parameter) for parameter in self._trainable]

    def _fill(self, order: list[int]) -> Buckets:
        """Each gradient joins the first of the open buckets with room in its owner's segment."""
        self._memory = []
        limit = self._bucket_bytes / dist.get_world_size()
        buckets: Buckets = []
        used: list[list[int]] = []  # of each bucket, by rank, bytes in its segment
        for index in order:
            parameter, owner = self._trainable[index], self._owners[index]
            room = (
                number
                for number in range(len(buckets))[-_OPEN_BUCKETS:]
                if self._trainable[buckets[number][0]].dtype == parameter.dtype
                and used[number][owner] + parameter.nbytes <= max(limit, *used[number])
            )
            number = next(room, len(buckets))
            if number == len(buckets):
                buckets.append([])
                used.append([0] * dist.get_world_size())
            buckets[number].append(index)
            used[number][owner] += parameter.nbytes
        return in_order_of_completion(buckets, order)

    def _segments(self, bucket: list[int]) -> Segments:
        """The gradients of each owner in its segment."""
        segments: Segments = [[] for _ in range(dist.get_world_size())]
        for index in bucket:
            segments[self._owners[index]].append(self._trainable[index])
        return segments

    def _start_another_pass(self) -> None:
        raise RuntimeError(
            "a second backward pass before finish_gradient_synchronization(); allowed: all but the last one "
            "under no_sync(), as half-reduced gradients cannot be added to"
        )

    def _average_gradients(self) -> None:
        super()._average_gradients()
        for parameter, owner in zip(self._trainable, self._owners, strict=True):
            if owner != dist.get_rank():
                parameter.grad = None

    def _not_finite(self) -> Tensor | None:
        return not_finite(self._trainable)

    def _spread(self, nan: Tensor) -> None:
        """Let a rank that does not own such a gradient have NaN too: a GradScaler skips its step."""
        for index in nan.nonzero().flatten().tolist():
            self._trainable[index].grad = torch.full_like(self._trainable[index], torch.nan)
