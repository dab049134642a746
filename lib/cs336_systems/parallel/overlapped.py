"""Data parallelism that communicates during backward, one message for each gradient or each bucket of them.

The gradients of the last layers travel while those of the first are still being computed. All ranks must
start the same all-reduces in the same order: a bucket leaves once it is complete *and* all buckets before it
have left. In the first step the order is that of the parameters, reversed; from then on it is the order in
which rank 0 saw the gradients of the first step become ready.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.ddp import DataParallel, start_mean, weakly
from cs336_systems.parallel.guards import check_bucket_size
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer
from cs336_systems.parallel.shards import BucketMemory, Segments, allocate, fill_buckets


class OverlappedDDP(DataParallel):
    """An asynchronous all-reduce for each gradient as soon as backward has accumulated it.

    Several backward passes may precede `finish_gradient_synchronization()`: as many on every rank, not
    necessarily of the same parameters. Passes under `no_sync()` only add up; any other pass first waits for
    what is in flight, and averages again, as the mean of a mean is itself. A parameter that is not used in a
    pass holds back those behind it in the agreed order until the next pass or the end. Until then gradients
    may be in flight: they must not be changed, nor may one rank alone run another pass.
    """

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self._observed: dict[int, None] | None = {}  # in the first step: its order (an ordered set)
        self._use_order(list(range(len(self._trainable)))[::-1])
        for index, parameter in enumerate(self._trainable):
            parameter.register_hook(weakly(self._before_accumulation, index))
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_is_ready, index))

    def _use_order(self, order: list[int]) -> None:
        self._buckets = self._fill(order)
        self._bucket_of = {
            index: number for number, bucket in enumerate(self._buckets) for index in bucket
        }
        self._start_pass()

    def _fill(self, order: list[int]) -> list[list[int]]:
        """The buckets, for gradients that become ready in this order."""
        return [[index] for index in order]

    def _message(self, number: int) -> Tensor:
        """What to send for a bucket; where it lies, the means are expected."""
        (index,) = self._buckets[number]
        return self._gradient(index)

    def _start_pass(self) -> None:
        self._missing = [
            len(bucket) for bucket in self._buckets
        ]  # of each bucket, gradients not ready
        self._ready = set[int]()  # indices of gradients that this pass has made
        # Of the buckets that were sent, in their order: the next to be sent is len(in_flight).
        self._in_flight: list[dist.Work] = []
        self._end_is_announced = self._is_over = False

    # These two run for every parameter in every backward pass: each microsecond counts hundreds of times.
    def _before_accumulation(self, index: int) -> None:
        # What is being averaged must not be added to. And ranks whose passes reach different parameters have
        # to send the gradients of one pass before those of the next.
        if self._is_over or index in self._ready:
            if self._keeps_shards:
                raise RuntimeError(
                    "a second backward pass before finish_gradient_synchronization(); allowed: all but the "
                    "last one under no_sync(), as half-reduced gradients cannot be added to"
                )
            self._complete_pass()

    def _gradient_is_ready(self, index: int) -> None:
        self._unused.discard(index)
        if self._observed is not None:
            self._observed.setdefault(index)
        if not self._synchronizes:
            return
        number = self._bucket_of[index]
        self._announce_end()
        self._ready.add(index)
        self._missing[number] -= 1
        if self._missing[number] == 0 and number == len(self._in_flight):
            self._send()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module; a pass that was not finished is given up, once its messages have come."""
        if (
            self._ready
        ):  # all ranks send all messages of a pass, or they would mix up those of the next
            self._complete_pass()
        super().zero_grad(set_to_none)

    def _send(self, incomplete_too: bool = False) -> None:
        """Start the all-reduces of the buckets that come next: as many as are complete, or all."""
        for number in range(len(self._in_flight), len(self._buckets)):
            if self._missing[number] and not incomplete_too:
                return
            work = start_mean(self._message(number), self._backend, scatter=self._keeps_shards)
            self._in_flight.append(work)

    @torch.no_grad()
    def _complete_pass(self) -> None:
        self._send(incomplete_too=True)
        for work in self._in_flight:
            work.wait()
        self._start_pass()

    def _average_gradients(self) -> None:
        self._complete_pass()
        if self._observed is not None:
            last = range(len(self._trainable))[
                ::-1
            ]  # what the step did not use comes behind the rest
            order = torch.tensor(
                [*(self._observed | dict.fromkeys(last))], device=self._trainable[0].device
            )
            dist.broadcast(order, src=0)
            self._observed = None
            self._use_order(order.tolist())


class BucketedDDP(OverlappedDDP):
    """The same in few, larger messages: gradients lie side by side in buckets, and a full bucket leaves.

    Each `.grad` is a view into its bucket, so nothing is unpacked after an all-reduce. After zero_grad(),
    autograd brings fresh tensors, which are copied to their slices when their bucket leaves; after
    zero_grad(set_to_none=False) backward adds right into the bucket, which reads and writes more. The buckets
    stay allocated between steps.

    Args:
        bucket_size_mb: the most a bucket holds, in MB of 2**20 bytes as in PyTorch's DDP. A larger gradient
            is a bucket of its own.

    Raises:
        ValueError: bucket_size_mb is not a positive number.
    """

    _open_buckets, _ranks = 1, 1  # ranks: segments of a bucket
    _owners: Sequence[int] = ()  # of each gradient its segment, if there are several

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        check_bucket_size(bucket_size_mb)
        self._bucket_bytes = bucket_size_mb * 2**20
        super().__init__(module)

    def _description(self) -> list[str]:
        return [*super()._description(), f"buckets of {self._bucket_bytes:g} bytes"]

    def _fill(self, order: list[int]) -> list[list[int]]:
        # Allocated on first use. After the first step, gradients keep the old buckets alive until zeroed.
        self._memory: list[BucketMemory] = []
        limit = self._bucket_bytes / self._ranks
        return fill_buckets(self._trainable, order, limit, self._owners, self._open_buckets)

    def _message(self, number: int) -> Tensor:
        """The bucket, with each gradient in its slice; those that are not yet there move in one kernel."""
        if not self._memory:
            self._memory = allocate([self._segments(bucket) for bucket in self._buckets])
        memory = self._memory[number]
        slices, fresh = [], []
        for index in self._buckets[number]:
            gradient, parameter = self._gradient(index), self._trainable[index]
            view = memory.views[parameter]
            if parameter.grad is not view:
                parameter.grad = view
                slices.append(view)
                fresh.append(gradient)
        if fresh:
            torch._foreach_copy_(slices, fresh)
        return memory.whole

    def _segments(self, bucket: list[int]) -> Segments:
        owner = self._owners or dict.fromkeys(bucket, 0)
        return [
            [self._trainable[n] for n in bucket if owner[n] == rank] for rank in range(self._ranks)
        ]


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

    _keeps_shards, _open_buckets = True, 3

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


def bucket_bytes(parameters: Iterable[Tensor], bucket_size_mb: float) -> list[int]:
    """Sizes of BucketedDDP's messages in its first step; parameters of one dtype, on meta too."""
    tensors = list(parameters)
    buckets = fill_buckets(tensors, range(len(tensors))[::-1], bucket_size_mb * 2**20)
    return [sum(tensors[index].nbytes for index in bucket) for bucket in buckets]
