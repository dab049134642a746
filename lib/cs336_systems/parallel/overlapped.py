"""Data parallelism that communicates during backward, one message for each gradient or each bucket of them.

The gradients of the last layers travel while those of the first are still being computed. All ranks must
start the same all-reduces in the same order, or they hang or mix up gradients. So the order is agreed: a
bucket leaves once it is complete *and* all buckets before it have left. In the first step the order is that
of the parameters, reversed, as backward runs from the last layer to the first. From then on it is the order
in which rank 0 saw the gradients of the first step become ready.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.ddp import DataParallel, Mean

_ALIGNMENT_BYTES = 128  # of each gradient in its bucket: vectorised kernels are slow at odd addresses

# Each bucket lists places in the list of trainable parameters, in the order in which they become ready.
Buckets = list[list[int]]


class OverlappedDDP(DataParallel):
    """An asynchronous all-reduce for each gradient as soon as backward has accumulated it.

    Several backward passes may precede `finish_gradient_synchronization()`: as many on every rank, each of
    which reaches a trainable parameter, not necessarily the same ones. Passes under `no_sync()` only add up;
    any other pass first waits for what is under way, and averages again. That is right too, as the mean of
    a mean is itself, only slower. A parameter that is not used in a pass holds back those behind it in the
    agreed order until the next pass or `finish_gradient_synchronization()`.
    """

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self._observed: dict[int, None] = {}  # the order of the first step; a dict as an ordered set
        self._order_is_final = False
        self._use_order(list(range(len(self._trainable)))[::-1])
        this = weakref.ref(self)  # Python cannot collect a cycle through a tensor's hooks
        for place, parameter in enumerate(self._trainable):
            parameter.register_hook(_before_accumulation(this, place))
            parameter.register_post_accumulate_grad_hook(_after_accumulation(this, place))

    def _use_order(self, order: list[int]) -> None:
        self._buckets = self._split(order)
        self._bucket_of = {place: number for number, bucket in enumerate(self._buckets) for place in bucket}
        self._start_pass()

    def _split(self, order: list[int]) -> Buckets:
        return [[place] for place in order]

    def _start_pass(self) -> None:
        self._ready: set[int] = set()  # places whose gradient this pass has made
        self._awaits_end = self._pass_is_over = False
        self._missing = [len(bucket) for bucket in self._buckets]
        self._under_way: list[Mean] = []  # one for each bucket that has left

    def _gradient_is_ready(self, place: int) -> None:
        self._absent.discard(place)
        if not self._order_is_final:
            self._observed.setdefault(place)
        if self._synchronizes:
            if not self._awaits_end:
                self._awaits_end = True
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
            self._ready.add(place)
            number = self._bucket_of[place]
            self._missing[number] -= 1
            if self._missing[number] == 0 and number == len(self._under_way):
                self._send_complete()

    def _backward_ends(self) -> None:
        self._awaits_end = False
        # Inside a node it was only a part of the pass, as checkpoint(use_reentrant=True) runs them.
        self._pass_is_over = torch._C._current_autograd_node() is None

    def _send_complete(self) -> None:
        while len(self._under_way) < len(self._buckets) and self._missing[len(self._under_way)] == 0:
            self._send_next()

    def _send_next(self) -> None:
        contribution = self._contribution(self._buckets[len(self._under_way)])
        self._under_way.append(Mean(contribution, self._backend))

    def _contribution(self, bucket: list[int]) -> Tensor:
        (place,) = bucket
        return self._gradient(place)

    def _send_gradients(self) -> None:
        while len(self._under_way) < len(self._buckets):
            self._send_next()

    @torch.no_grad()
    def _complete_pass(self) -> None:
        self._send_gradients()
        for mean in self._under_way:
            mean.wait()
        self._start_pass()

    def _average_gradients(self) -> None:
        self._complete_pass()
        if not self._order_is_final:
            self._agree_on_order()

    def _agree_on_order(self) -> None:
        unobserved = [place for place in range(len(self._trainable))[::-1] if place not in self._observed]
        order = torch.tensor([*self._observed, *unobserved], device=self._trainable[0].device)
        dist.broadcast(order, src=0)
        self._order_is_final = True
        self._use_order(order.tolist())


# These two run for every parameter in every backward pass: each microsecond in them counts hundreds of times.
def _before_accumulation(this: weakref.ref, place: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        # What is being averaged must not be added to. And ranks whose passes reach different parameters
        # have to send the gradients of one pass before those of the next.
        wrapper = this()
        if wrapper and (wrapper._pass_is_over or place in wrapper._ready):
            wrapper._complete_pass()

    return hook


def _after_accumulation(this: weakref.ref, place: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        if wrapper := this():
            wrapper._gradient_is_ready(place)

    return hook


def fill_buckets(tensors: Sequence[Tensor], order: Sequence[int], bucket_bytes: float) -> Buckets:
    """Fill buckets with tensors in this order, each up to its limit; a bucket holds one dtype and device.

    Args:
        tensors: parameters or gradients; only their sizes matter, so they may be on the meta device.
        order: places in `tensors`, in the order in which they become ready.
        bucket_bytes: the most a bucket holds; a larger tensor is a bucket of its own.

    Returns:
        The buckets, in the order in which they become complete.
    """
    buckets: Buckets = []
    open_buckets: dict[tuple, tuple[list[int], float]] = {}
    for place in order:
        tensor = tensors[place]
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        bucket, used = open_buckets.get(kind, ([], math.inf))
        if used + size > bucket_bytes:
            bucket, used = [], 0.0
            buckets.append(bucket)
        bucket.append(place)
        open_buckets[kind] = (bucket, used + size)
    # A bucket is complete when its last gradient is ready.
    position = {place: number for number, place in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def bucket_bytes(parameters: Iterable[Tensor], bucket_size_mb: float) -> list[int]:
    """Sizes of the messages of BucketedDDP, the first one first; parameters on the meta device will do.

    Of one dtype and trainable; in the reverse of their order, as in the first step.
    """
    tensors = list(parameters)
    buckets = fill_buckets(tensors, range(len(tensors))[::-1], bucket_size_mb * 2**20)
    return [sum(tensors[place].nbytes for place in bucket) for bucket in buckets]


class BucketedDDP(OverlappedDDP):
    """The same in few, larger messages: gradients lie side by side in buckets, and a full bucket leaves.

    All buckets are stretches of one buffer (one for each dtype and device), and each `.grad` is a view into
    it, so nothing is unpacked after an all-reduce. With zero_grad(set_to_none=False), nothing is packed
    either: backward adds right into the buffer. After zero_grad(set_to_none=True), autograd brings fresh
    tensors, which are copied to their places when their bucket leaves: that reads and writes once, while
    clearing and adding would read twice and write twice. The buffer stays allocated between steps.

    Args:
        bucket_size_mb: the most a bucket holds, in MB of 2**20 bytes as in PyTorch's DDP. A larger gradient
            is a bucket of its own.

    Raises:
        ValueError: bucket_size_mb is not a positive number.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        if not (isinstance(bucket_size_mb, Real) and 0 < bucket_size_mb < math.inf):
            raise ValueError(f"bucket_size_mb is {bucket_size_mb!r}; allowed: a number above 0")
        self._bucket_bytes = bucket_size_mb * 2**20
        super().__init__(module)

    def _description(self) -> list[str]:
        return [*super()._description(), f"buckets of {self._bucket_bytes:g} bytes"]

    def _use_order(self, order: list[int]) -> None:
        super()._use_order(order)
        # Made on first use. After the first step, gradients keep the old buffer alive until they are zeroed.
        self._views: dict[int, Tensor] = {}
        self._flat: dict[int, Tensor] = {}

    def _split(self, order: list[int]) -> Buckets:
        return fill_buckets(self._trainable, order, self._bucket_bytes)

    def _lay_out(self) -> None:
        """Allocate the buffer of each kind, cut it into buckets, and each bucket into a view per gradient."""
        kinds = [self._kind(bucket[0]) for bucket in self._buckets]
        for kind in set(kinds):
            numbers = [number for number in range(len(kinds)) if kinds[number] == kind]
            lengths = [[self._padded_length(place) for place in self._buckets[number]] for number in numbers]
            sizes = [sum(bucket_lengths) for bucket_lengths in lengths]
            dtype, device = kind
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for number, flat, bucket_lengths in zip(numbers, buffer.split(sizes), lengths, strict=True):
                self._flat[number] = flat
                stretches = flat.split(bucket_lengths)
                for place, stretch in zip(self._buckets[number], stretches, strict=True):
                    parameter = self._trainable[place]
                    self._views[place] = stretch[: parameter.numel()].view(parameter.shape)

    def _kind(self, place: int) -> tuple[torch.dtype, torch.device]:
        return self._trainable[place].dtype, self._trainable[place].device

    def _padded_length(self, place: int) -> int:
        parameter = self._trainable[place]
        step = _ALIGNMENT_BYTES // parameter.element_size()
        return -(-parameter.numel() // step) * step

    def _contribution(self, bucket: list[int]) -> Tensor:
        """The bucket, with each gradient in its place; those that are not yet there move in one kernel."""
        if not self._views:
            self._lay_out()
        places, fresh = [], []
        for place in bucket:
            gradient, parameter, view = self._gradient(place), self._trainable[place], self._views[place]
            if parameter.grad is not view:
                parameter.grad = view
                places.append(view)
                fresh.append(gradient)
        if fresh:
            torch._foreach_copy_(places, fresh)
        return self._flat[self._bucket_of[bucket[0]]]
