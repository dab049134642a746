"""A parameter group of FSDP: weights that are gathered, freed and reduced together, in two flat buffers.

Each weight is cut by rows as torch.chunk does it: of n rows and N ranks, rank r holds the ceil(n/N) from
r * ceil(n/N) on; the last ranks may hold fewer or none. On the way they are padded to the same length. The
shards of a group lie side by side in one buffer, so one kernel casts them all. The whole weights lie in
another, and each is gathered right into its slice there; no message is packed or unpacked:

    rank 0 holds     a: row 0, row 1 | b: row 0, row 1         | c ...
    rank 1 holds     a: row 2, row 3 | b: row 2, padding       | c ...
    gathered         a: row 0 ... row 3 | b: row 0 ... row 2, padding | c ...
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partialmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn import functional as F

from cs336_systems.parallel.ddp import ALL_GATHER, REDUCE_SCATTER, as_it_is_sent, ready_for_mean
from cs336_systems.parallel.guards import refuse_copies
from cs336_systems.parallel.shards import ALIGNMENT_BYTES


class CommunicationStream:
    """Where messages travel beside the computation: over NCCL a CUDA stream, over Gloo its threads.

    Inside `with stream:` kernels and messages are queued on it, behind what the computation has been given so
    far. Over Gloo they are simply called.
    """

    def __init__(self, device: torch.device, backend: str):
        self.backend = backend
        self.cuda = torch.cuda.Stream(device, priority=-1) if backend == "nccl" else None
        if self.cuda is not None:
            self._reached, self._inside = torch.cuda.Event(), torch.cuda.stream(self.cuda)

    def __enter__(self) -> "CommunicationStream":
        if self.cuda is not None:
            self._reached.record()
            self.cuda.wait_event(self._reached)
            self._inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.cuda is not None:
            self._inside.__exit__(*error)

    def start(
        self,
        collective: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        then: Callable[[], Any] = lambda: None,
        **how: Any,
    ) -> Callable[[], Any]:
        """Send one message a pair, then call `then`; returns what waits for both, keeping what that uses."""
        call, pairs = getattr(dist, collective), zip(outputs, inputs, strict=True)
        if self.cuda is None:
            works = [call(*pair, **how, async_op=True) for pair in pairs]
            return lambda: (
                [work.wait() for work in works],
                inputs,
                then(),
            )  # Gloo reads them until then
        # Several in one kernel.
        with _coalescing_manager() if len(outputs) > 1 else contextlib.nullcontext():
            for pair in pairs:
                call(*pair, **how)
        then()
        event = self.cuda.record_event()
        return lambda: (torch.cuda.current_stream().wait_event(event), then)  # `then` is kept


class Home(NamedTuple):
    """Where a parameter is."""

    parameter: nn.Parameter
    user: nn.Module  # whose forward needs it
    holder: nn.Module
    name: str  # in its holder


class ShardedWeight(NamedTuple):
    """One weight, twice."""

    parameter: nn.Parameter  # the module's own, which the optimizer sees: this rank's rows
    whole: (
        nn.Parameter
    )  # the leaf of autograd's graph: it has memory only while its group is gathered


class ParameterGroup:
    """Some weights, of which every rank holds its rows, and all rows while the group is gathered."""

    @torch.no_grad()
    def __init__(
        self,
        homes: Sequence[Home],
        names: Mapping[nn.Module, str],
        dtype: torch.dtype | None,
        streams: tuple[CommunicationStream, CommunicationStream],
    ):
        self.users = list(
            dict.fromkeys(home.user for home in homes)
        )  # their forward needs the group
        parameters = list(dict.fromkeys(home.parameter for home in homes))
        self.name = " and ".join(names[user] for user in self.users)
        self.is_gathered = False  # the whole weights have memory, and are there or on their way
        self.is_in_backward = False  # backward has reached the group, and is not done with it
        self.is_saved = False  # autograd has a note of one of them, for backward
        self.ready = set[int]()  # which weights have a gradient of this backward pass
        self.task = -1  # of autograd, in which backward reached it
        self.calls = self.position = 0  # forward passes under way; place in the order of forward
        self._gather_stream, self._reduce_stream = streams
        self._arrival: Callable[[], Any] | None = (
            None  # what waits for the gather that is on its way
        )
        first, world_size, rank = parameters[0], dist.get_world_size(), dist.get_rank()
        self._dtype = dtype or first.dtype
        step = ALIGNMENT_BYTES // min(first.element_size(), self._dtype.itemsize)
        self._cuts: list[
            int
        ] = []  # of every shard in the buffer: its length, and the gap to the next
        self._places: list[tuple] = []  # of this rank's rows in it: shape, strides, start
        own: list[Tensor] = []
        for whole in parameters:
            rows = -(-len(whole) // world_size)
            own.append(mine := whole[rank * rows : (rank + 1) * rows])
            strides = torch.empty(mine.shape, device="meta").stride()
            self._places.append((mine.shape, strides, sum(self._cuts)))
            length = rows * math.prod(whole.shape[1:])
            self._cuts += [length, -length % step]
        self._shards = torch.zeros(sum(self._cuts), dtype=first.dtype, device=first.device)
        whole = torch.empty(sum(self._cuts) * world_size, dtype=self._dtype, device=first.device)
        self._memory, self.nbytes = whole.untyped_storage(), whole.nbytes  # while they are gathered
        self._slices = whole.split([n * world_size for n in self._cuts])[::2]
        self._own, self.weights = self._own_rows(self._shards), list[ShardedWeight]()
        for parameter, piece, mine, values in zip(
            parameters, self._slices, self._own, own, strict=True
        ):
            # .data: what autograd keeps must not notice that the memory is filled again.
            view = piece[: parameter.numel()].view(parameter.shape).data
            self.weights.append(ShardedWeight(parameter, nn.Parameter(view)))
            parameter.data = mine.copy_(values)
        self._memory.resize_(0)
        self._homes, wholes = [], dict(self.weights)
        for parameter, _, holder, key in homes:
            self._homes.append((holder._parameters, key, (parameter, wholes[parameter])))

    __reduce_ex__ = refuse_copies

    def _padded_slices(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Of a buffer laid out as that of the shards, the slice of each weight with its padding rows."""
        return buffer.split(self._cuts)[::2]

    def _own_rows(self, buffer: Tensor) -> list[Tensor]:
        """Likewise the slice of each weight that this rank holds, in its shape."""
        return [buffer.as_strided(*place) for place in self._places]

    def start_gather(self) -> None:
        """Fill the whole weights from the shards of all ranks, beside the computation."""
        self.is_gathered = True
        # Memory of the computation's own stream: it returns there when it is freed.
        self._memory.resize_(self.nbytes)
        with self._gather_stream as stream:
            shards = self._padded_slices(self._shards.to(self._dtype))
            self._arrival = stream.start(ALL_GATHER, self._slices, shards)
        self.pointer, self.versions = self._memory.data_ptr(), self.versions_now()

    def versions_now(self) -> int:
        """Grows when a shard is written to, as an optimizer does."""
        return sum(weight.parameter._version for weight in self.weights)

    def wait_for_gather(self) -> None:
        """What is computed from here on finds the whole weights."""
        if self._arrival is not None:
            self._arrival()
            self._arrival = None

    def _show(self, which: int) -> None:
        for parameters, key, values in self._homes:
            parameters[key] = values[which]

    reshard = partialmethod(_show, 0)  # the modules offer their shards, as to an optimizer
    unshard = partialmethod(_show, 1)  # they compute with the whole weights

    def free(self) -> None:
        """Give the memory of the whole weights back."""
        self.wait_for_gather()  # a message may still be writing to it
        self._memory.resize_(0)
        self.is_gathered = self.is_in_backward = self.is_saved = False
        self.ready.clear()  # of a pass that did not reach all weights

    def start_reduction(self) -> tuple[list[Tensor], Callable[[], Any]]:
        """Send whole gradients to their ranks; returns them, and a wait for the means in every `.grad`."""
        gradients = [
            self._take_gradient(*pair) for pair in zip(self.weights, self._slices, strict=True)
        ]
        # In the memory of the computation's stream, which will free it.
        target = received = torch.empty_like(self._shards)

        def hand_over() -> None:
            with torch.no_grad():
                if received is not target:
                    torch._foreach_copy_([target], [received])  # on a GPU faster than copy_
                for (parameter, _), mean in zip(self.weights, self._own_rows(target), strict=True):
                    parameter.grad = mean if parameter.grad is None else parameter.grad.add_(mean)
                for parameter, _ in self.weights:
                    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                        hook(parameter)

        with self._reduce_stream as stream:
            if (dtype := gradients[0].dtype) != target.dtype:
                received = torch.empty_like(target, dtype=dtype)
            operation, slices = (
                ready_for_mean(gradients, stream.backend),
                self._padded_slices(received),
            )
            return gradients, stream.start(
                REDUCE_SCATTER, slices, gradients, hand_over, op=operation
            )

    def _take_gradient(self, weight: ShardedWeight, slice_: Tensor) -> Tensor:
        """Of the whole weight, flat, with its padding rows."""
        gradient, weight.whole.grad = weight.whole.grad, None
        if gradient is None:
            return weight.whole.new_zeros(len(slice_))
        flat = as_it_is_sent(gradient).view(-1)
        return F.pad(flat, (0, len(slice_) - len(flat))) if len(slice_) > len(flat) else flat

    def gather_full(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter, and it whole, in the dtype of its shard."""
        for weight, piece in zip(self.weights, self._padded_slices(self._shards), strict=True):
            whole = piece.new_empty(dist.get_world_size() * len(piece))
            getattr(dist, ALL_GATHER)(whole, piece)
            yield weight.parameter, whole[: weight.whole.numel()].view_as(weight.whole)
