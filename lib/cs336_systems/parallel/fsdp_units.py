"""A unit of FSDP: weights that are gathered, freed and reduced together, their memory and their messages.

Each weight is cut by rows as torch.chunk does it: of n rows and N ranks, rank r holds the ceil(n/N) from
r * ceil(n/N) on; the last ranks may hold fewer or none. On the way they are padded to the same length. The
shards of a unit lie side by side in one buffer, so one kernel casts them all. The whole weights lie in
another, and each is gathered right into its place there; no message is packed or unpacked:

    rank 0 holds     a: row 0, row 1 | b: row 0, row 1         | c ...
    rank 1 holds     a: row 2, row 3 | b: row 2, padding       | c ...
    gathered         a: row 0 ... row 3 | b: row 0 ... row 2, padding | c ...
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn import functional as F

from cs336_systems.parallel.ddp import ALL_GATHER, REDUCE_SCATTER
from cs336_systems.parallel.shards import ALIGNMENT_BYTES


class Lane:
    """Where messages travel beside the computation: over NCCL a CUDA stream, over Gloo threads of its own.

    Inside `with lane:` kernels and messages are queued on the stream, behind what the computation has been
    given so far. Over Gloo they are simply called.
    """

    def __init__(self, device: torch.device, backend: str):
        self.stream = None
        if backend == "nccl":
            self.stream, self._reached = torch.cuda.Stream(device, priority=-1), torch.cuda.Event()
            self._inside = torch.cuda.stream(self.stream)

    def __enter__(self) -> None:
        if self.stream is not None:
            self._reached.record()
            self.stream.wait_event(self._reached)
            self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self._inside.__exit__(*error)

    def send(self, collective: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[dist.Work]:
        """One message for each pair; what to wait for, if it is not the stream that waits."""
        call: Callable[..., Any] = getattr(dist, collective)
        if self.stream is None:
            return [call(*pair, async_op=True) for pair in zip(outputs, inputs, strict=True)]
        if collective == REDUCE_SCATTER:
            call = partial(call, op=dist.ReduceOp.AVG)  # NCCL divides on the fly
        # Several in one kernel.
        with _coalescing_manager() if len(outputs) > 1 else contextlib.nullcontext():
            for pair in zip(outputs, inputs, strict=True):
                call(*pair)
        return []


class ShardedWeight(NamedTuple):
    """One weight, twice."""

    parameter: nn.Parameter  # the module's own, which the optimizer sees: this rank's rows
    whole: nn.Parameter  # the leaf of autograd's graph: it has memory only while its unit is gathered


class Unit:
    """Some weights, of which every rank holds its rows, and all rows while the unit is gathered.

    Attributes:
        weights: in the order of the module's parameters.
        nbytes: of the whole weights, with padding, while they are gathered.
        is_gathered: the whole weights have memory, and are there or on their way.
        is_in_backward: backward has reached the unit, and is not done with it.
        users: how many forward passes of its modules are under way.
        ready: which weights have a gradient of this backward pass.
    """

    def __init__(
        self,
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]],
        dtype: torch.dtype | None,
        lanes: tuple[Lane, Lane],
    ):
        self.weights: list[ShardedWeight] = []
        self.trainable = [n for n, parameter in enumerate(places) if parameter.requires_grad]
        self.is_gathered = self.is_in_backward = False
        self.users, self.ready = 0, set[int]()
        self._gather_lane, self._reduce_lane = lanes
        self._allocate(list(places), dtype)
        self._homes = [
            (module._parameters, name, weight.parameter, weight.whole)
            for weight in self.weights
            for module, name in places[weight.parameter]
        ]

    def __deepcopy__(self, memo: dict) -> "Unit":
        raise TypeError(
            "FSDP has been asked for a deep copy; allowed: one of the module, before it is wrapped"
        )

    @torch.no_grad()
    def _allocate(self, parameters: list[nn.Parameter], dtype: torch.dtype | None) -> None:
        first, world_size = parameters[0], dist.get_world_size()
        self._dtype = dtype or first.dtype
        alignment = ALIGNMENT_BYTES // min(first.element_size(), self._dtype.itemsize)
        own = self._cut([parameter.detach() for parameter in parameters], alignment)
        self._shards = torch.zeros(sum(self._cuts), dtype=first.dtype, device=first.device)
        whole = torch.empty(sum(self._cuts) * world_size, dtype=self._dtype, device=first.device)
        self._memory, self.nbytes = whole.untyped_storage(), whole.nbytes
        self._places = whole.split([n * world_size for n in self._cuts])[::2]
        self._own = self._own_rows(self._shards)
        for parameter, place, mine, values in zip(parameters, self._places, self._own, own, strict=True):
            # .data: what autograd keeps must not notice that the memory is filled again.
            view = place[: parameter.numel()].view(parameter.shape).data
            leaf = nn.Parameter(view, requires_grad=parameter.requires_grad)
            self.weights.append(ShardedWeight(parameter, leaf))
            mine.copy_(values)
            parameter.data = mine
        self._memory.resize_(0)
        self._addresses = [parameter.data_ptr() for parameter in parameters]

    def _cut(self, wholes: list[Tensor], alignment: int) -> list[Tensor]:
        """Decide where each weight's shard lies in the buffer; returns this rank's rows of each."""
        world_size, rank = dist.get_world_size(), dist.get_rank()
        rows = [-(-len(whole) // world_size) for whole in wholes]
        own = [whole[rank * n : (rank + 1) * n] for n, whole in zip(rows, wholes, strict=True)]
        self._own_shapes = [mine.shape for mine in own]
        self._cuts: list[int] = []  # of every shard: its length, and the gap to the next
        self._own_cuts: list[int] = []  # likewise, but where this rank's rows end
        for n, whole, mine in zip(rows, wholes, own, strict=True):
            length = n * math.prod(whole.shape[1:])
            end = -(-length // alignment) * alignment
            self._cuts += [length, end - length]
            self._own_cuts += [mine.numel(), end - mine.numel()]
        return own

    def _stretches(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Of a buffer laid out as that of the shards, the part of each weight with its padding rows."""
        return buffer.split(self._cuts)[::2]

    def _own_rows(self, buffer: Tensor) -> list[Tensor]:
        """Likewise the part of each weight that this rank holds, in its shape."""
        parts = buffer.split(self._own_cuts)[::2]
        return [part.view(shape) for part, shape in zip(parts, self._own_shapes, strict=True)]

    def start_gather(self) -> None:
        """Fill the whole weights from the shards of all ranks, beside the computation."""
        self._take_back_replaced_data()
        self.is_gathered = True
        # Memory of the computation's own stream: it returns there when it is freed.
        self._memory.resize_(self.nbytes)
        with self._gather_lane:
            shards = self._shards.to(self._dtype)
            self._gathering = self._gather_lane.send(ALL_GATHER, self._places, self._stretches(shards))
            if self._gather_lane.stream is not None:
                self._gathered = self._gather_lane.stream.record_event()
            else:
                self._sent = shards  # Gloo reads it until it is done
        self._is_waited_for = False

    def _take_back_replaced_data(self) -> None:
        """An optimizer may give a parameter new memory (p.data = ...) instead of writing to the old."""
        for number, weight in enumerate(self.weights):
            if weight.parameter.data_ptr() != self._addresses[number]:
                self._own[number].copy_(weight.parameter.data)
                weight.parameter.data = self._own[number]

    def wait_for_gather(self) -> None:
        """What is computed from here on finds the whole weights."""
        if self._is_waited_for:
            return
        if self._gather_lane.stream is not None:
            torch.cuda.current_stream().wait_event(self._gathered)
        for work in self._gathering:
            work.wait()
        self._is_waited_for, self._sent = True, None
        self._gathering = []  # what was waited for still holds its tensors

    def show_whole(self) -> None:
        """Let the modules compute with the whole weights."""
        for parameters, name, _, whole in self._homes:
            parameters[name] = whole

    def show_shards(self) -> None:
        """Let the modules offer their shards, as to an optimizer."""
        for parameters, name, shard, _ in self._homes:
            parameters[name] = shard

    def free(self) -> None:
        """Give the memory of the whole weights back."""
        self.wait_for_gather()  # a message may still be writing to it
        self._memory.resize_(0)
        self.is_gathered = self.is_in_backward = False
        self.ready.clear()  # of a pass that did not reach all weights

    @property
    def has_gradients(self) -> bool:
        """Some gradient waits to be reduced."""
        return any(weight.whole.grad is not None for weight in self.weights)

    def start_reduction(self) -> "Reduction":
        """Take the gradients of the whole weights and start to reduce and scatter them."""
        gradients = [self._take_gradient(self.weights[number]) for number in self.trainable]
        stretches = [self._cuts[2 * n] * dist.get_world_size() for n in self.trainable]
        flat = [
            F.pad(gradient.view(-1), (0, length - gradient.numel()))
            if length > gradient.numel()
            else gradient.view(-1)
            for gradient, length in zip(gradients, stretches, strict=True)
        ]
        return Reduction(self, flat)

    def _take_gradient(self, weight: ShardedWeight) -> Tensor:
        gradient, weight.whole.grad = weight.whole.grad, None
        if gradient is None:
            return self._places[0].new_zeros(weight.whole.shape)
        if gradient.is_sparse:
            raise TypeError("a gradient is sparse; allowed: dense ones, as of nn.Embedding(sparse=False)")
        return gradient.detach().contiguous()

    def gather_full(self) -> Iterator[Tensor]:
        """Every weight whole, in the dtype of its shard, one after the other."""
        self._take_back_replaced_data()
        for weight, stretch in zip(self.weights, self._stretches(self._shards), strict=True):
            whole = stretch.new_empty(dist.get_world_size() * len(stretch))
            getattr(dist, ALL_GATHER)(whole, stretch)
            yield whole[: weight.whole.numel()].view_as(weight.whole)


class Reduction:
    """The gradients of one unit on their way to their ranks. Until it is waited for, it keeps them alive."""

    def __init__(self, unit: Unit, gradients: list[Tensor]):
        self._unit, self._gradients = unit, gradients
        self._lane = lane = unit._reduce_lane
        # In the memory of the computation's stream, which will free it.
        self._target = torch.empty_like(unit._shards)
        with lane:
            same = gradients[0].dtype == self._target.dtype
            self._received = (
                self._target if same else torch.empty_like(self._target, dtype=gradients[0].dtype)
            )
            stretches = unit._stretches(self._received)
            outputs = [stretches[number] for number in unit.trainable]
            self._works = lane.send(REDUCE_SCATTER, outputs, gradients)
            if lane.stream is not None:
                self._hand_over()
                self._done = lane.stream.record_event()

    def wait(self) -> None:
        """What is computed from here on finds the means in every `.grad`."""
        if self._lane.stream is not None:
            torch.cuda.current_stream().wait_event(self._done)
        else:
            for work in self._works:
                work.wait()
            self._received.div_(dist.get_world_size())
            self._hand_over()
        self._gradients, self._target = [], None

    @torch.no_grad()
    def _hand_over(self) -> None:
        """Let the shards' `.grad` be what was received, or add it to what they have."""
        if self._received is not self._target:
            self._target.copy_(self._received)
        means = self._unit._own_rows(self._target)
        for number in self._unit.trainable:
            parameter = self._unit.weights[number].parameter
            if parameter.grad is None:
                parameter.grad = means[number]
            else:
                parameter.grad.add_(means[number])
        self._received = None
