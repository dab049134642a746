"""Data parallelism that communicates during backward, one message for each gradient or each bucket of them.

The gradients of the last layers travel while those of the first are still being computed. All ranks must
start the same all-reduces in the same order: a bucket leaves once it is complete *and* all buckets before it
have left. In the first step the order is that of the parameters, reversed; from then on it is the order in
which rank 0 saw the gradients of the first step become ready.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.ddp import GRADIENT_IS_GONE, DataParallel, start_mean, weak_hook
from cs336_systems.parallel.guards import check_bucket_size
from cs336_systems.parallel.shards import BucketMemory, allocate, fill_buckets, segment_bytes


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
        # In the first step, the order in which gradients become ready: a dictionary as an ordered set.
        self._observed: dict[int, None] | None = {}
        last_to_first = reversed(range(len(self._trainable)))
        self._use_order(list(last_to_first))
        for index, parameter in enumerate(self._trainable):
            parameter.register_hook(weak_hook(self._before_accumulation, index))
            parameter.register_post_accumulate_grad_hook(weak_hook(self._gradient_is_ready, index))

    def _use_order(self, order: list[int]) -> None:
        """Make the buckets for gradients that become ready in this order, and begin a pass with them."""
        self._buckets = self._fill(order)
        self._bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(self._buckets):
            self._bucket_of |= dict.fromkeys(bucket, number)
        self._start_pass()

    def _fill(self, order: list[int]) -> list[list[int]]:
        """The buckets, for gradients that become ready in this order."""
        return [[index] for index in order]

    def _message(self, number: int) -> Tensor:
        """What to send for a bucket; where it lies, the means are expected."""
        (index,) = self._buckets[number]
        return self._gradient(index)

    def _start_reduction(self, message: Tensor) -> Callable[[], Any]:
        """Returns what waits until the mean is there."""
        return start_mean(message, self._backend).wait

    def _start_pass(self) -> None:
        # Of each bucket, how many gradients are not ready.
        self._missing = [len(bucket) for bucket in self._buckets]
        # Indices of gradients that this pass has made.
        self._ready = set[int]()
        # What waits for the buckets that were sent, in their order: the next to be sent is len(in_flight).
        self._in_flight: list[Callable[[], Any]] = []
        self._end_is_announced = False
        self._is_over = False

    # These two run for every parameter in every backward pass: each microsecond counts hundreds of times.
    def _before_accumulation(self, index: int) -> None:
        # What is being averaged must not be added to. And ranks whose passes reach different parameters have
        # to send the gradients of one pass before those of the next.
        if self._is_over or index in self._ready:
            self._complete_pass()

    def _gradient_is_ready(self, index: int) -> None:
        self._unused.discard(index)
        if self._observed is not None:
            self._observed.setdefault(index)
        if not self._synchronizes:
            return
        number = self._bucket_of[index]
        if not self._end_is_announced:
            self._announce_end()
        self._ready.add(index)
        self._missing[number] -= 1
        if self._missing[number] == 0 and number == len(self._in_flight):
            self._send()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module; a pass that was not finished is given up, once its messages have come."""
        # All ranks send all messages of a pass, or they would mix up those of the next.
        if self._ready:
            self._complete_pass()
        super().zero_grad(set_to_none)

    def _send(self, incomplete_too: bool = False) -> None:
        """Start the all-reduces of the buckets that come next: as many as are complete, or all."""
        for number in range(len(self._in_flight), len(self._buckets)):
            if self._missing[number] and not incomplete_too:
                return
            self._in_flight.append(self._start_reduction(self._message(number)))

    @torch.no_grad()
    def _complete_pass(self) -> None:
        self._send(incomplete_too=True)
        for wait in self._in_flight:
            wait()
        self._start_pass()

    def _may_be_taken(self, parameter: Tensor) -> bool:
        # Its hooks tell which gradients were there: `_average_gradients` refuses.
        return False

    def _average_gradients(self) -> None:
        # Ready, but gone: now, or when its bucket left, so that `_gradient` has put zeros there.
        if any(self._trainable[i].grad is None or i in self._unused for i in self._ready):
            raise RuntimeError(GRADIENT_IS_GONE)
        self._complete_pass()
        if self._observed is not None:
            # All take rank 0's order of the first step. What that did not use comes behind the rest.
            observed = self._observed | dict.fromkeys(reversed(range(len(self._trainable))))
            order = torch.tensor(list(observed), device=self._trainable[0].device)
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

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        check_bucket_size(bucket_size_mb)
        self._bucket_bytes = bucket_size_mb * 2**20
        # It fills the first buckets.
        super().__init__(module)

    def _use_order(self, order: list[int]) -> None:
        # Allocated on first use. After the first step, gradients keep the old buckets alive until zeroed.
        self._memory: list[BucketMemory] = []
        super()._use_order(order)

    def _fill(self, order: list[int]) -> list[list[int]]:
        return fill_buckets(self._trainable, order, self._bucket_bytes)

    def _message(self, number: int) -> Tensor:
        """The bucket, with each gradient in its slice; those that are not yet there move in one kernel."""
        if not self._memory:
            gradients = [[self._trainable[index] for index in bucket] for bucket in self._buckets]
            # Each bucket is one segment.
            self._memory = allocate([[bucket] for bucket in gradients])
        memory = self._memory[number]
        slices: list[Tensor] = []
        fresh: list[Tensor] = []
        for index in self._buckets[number]:
            gradient = self._gradient(index)
            parameter = self._trainable[index]
            view = memory.views[parameter]
            if parameter.grad is not view:
                parameter.grad = view
                slices.append(view)
                fresh.append(gradient)
        if fresh:
            torch._foreach_copy_(slices, fresh)
        return memory.whole


class RoundedDDP(BucketedDDP):
    """The same, with every bucket sent in a narrower dtype; gradients keep their own.

    Args:
        compute_dtype: of the messages, in which the ranks are summed too.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float,
        compute_dtype: torch.dtype = torch.float32,
    ):
        self._message_dtype = compute_dtype
        super().__init__(module, bucket_size_mb)

    def _start_reduction(self, message: Tensor) -> Callable[[], Any]:
        rounded = message.to(self._message_dtype)
        work = start_mean(rounded, self._backend)

        def wait() -> None:
            work.wait()
            message.copy_(rounded)

        return wait


def bucket_bytes(parameters: Iterable[Tensor], bucket_size_mb: float) -> list[int]:
    """Sizes of BucketedDDP's messages in its first step, padded; parameters of one dtype, on meta too."""
    tensors = list(parameters)
    buckets = fill_buckets(tensors, range(len(tensors))[::-1], bucket_size_mb * 2**20)
    return [segment_bytes([[tensors[index] for index in bucket]]) for bucket in buckets]
