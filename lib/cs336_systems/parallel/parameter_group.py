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
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from cs336_systems.parallel.ddp import ALL_GATHER, REDUCE_SCATTER
from cs336_systems.parallel.shards import ALIGNMENT_BYTES


class CommunicationStream:
    """Where messages travel beside the computation: over NCCL a CUDA stream, over Gloo its threads.

    Inside `with stream:` kernels and messages are queued on it, behind what the computation has been given so
    far. Over Gloo they are simply called.
    """

    def __init__(self, device: torch.device, backend: str):
        self.cuda = None
        if backend == "nccl":
            self.cuda, self._reached = torch.cuda.Stream(device, priority=-1), torch.cuda.Event()
            self._inside = torch.cuda.stream(self.cuda)

    def __enter__(self) -> None:
        if self.cuda is not None:
            self._reached.record()
            self.cuda.wait_event(self._reached)
            self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.cuda is not None:
            self._inside.__exit__(*error)

    def send(self, collective: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[dist.Work]:
        """One message for each pair; what to wait for, if it is not the stream that waits."""
        call: Callable[..., Any] = getattr(dist, collective)
        if self.cuda is None:
            return [call(*pair, async_op=True) for pair in zip(outputs, inputs, strict=True)]
        if collective == REDUCE_SCATTER:
            call = partial(call, op=dist.ReduceOp.AVG)  # NCCL divides on the fly
        # Several in one kernel.
        with _coalescing_manager() if len(outputs) > 1 else contextlib.nullcontext():
            for pair in zip(outputs, inputs, strict=True):
                call(*pair)
        return []


class Resharded(Tensor):
    """Stands in a module for a weight that is not gathered: it has the shape and dtype, and no values."""

    def __new__(cls, whole: Tensor, name: str) -> "Resharded":
        tensor = Tensor._make_subclass(cls, whole, whole.requires_grad)
        tensor._what = name
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None):
        names = {leaf._what for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Resharded)}
        raise RuntimeError(
            f"{' and '.join(sorted(names))} of an FSDP is used while it is not gathered; allowed: inside the "
            "forward of its own module, or of one in unit_types around it"
        )

    def data_ptr(self) -> int:
        return self.__torch_dispatch__(None, (), (self,))  # as a kernel asks for it


class ShardedWeight(NamedTuple):
    """One weight, twice."""

    parameter: nn.Parameter  # the module's own, which the optimizer sees: this rank's rows
    whole: nn.Parameter  # the leaf of autograd's graph: it has memory only while its group is gathered


class ParameterGroup:
    """Some weights, of which every rank holds its rows, and all rows while the group is gathered.

    Attributes:
        name: of the modules whose forward needs it.
        weights: in the order of the module's parameters.
        nbytes: of the whole weights, with padding, while they are gathered.
        is_gathered: the whole weights have memory, and are there or on their way.
        is_in_backward: backward has reached the group, and is not done with it.
        users: how many forward passes of its modules are under way.
        ready: which weights have a gradient of this backward pass.
    """

    def __init__(
        self,
        name: str,
        homes: dict[nn.Parameter, list[tuple[nn.Module, str]]],
        dtype: torch.dtype | None,
        streams: tuple[CommunicationStream, CommunicationStream],
    ):
        self.name, self.weights, self.ready = name, list[ShardedWeight](), set[int]()
        self.trainable = [n for n, parameter in enumerate(homes) if parameter.requires_grad]
        self.is_gathered = self.is_in_backward = False
        self.users = self.position = 0
        self._gather_stream, self._reduce_stream = streams
        self._allocate(list(homes), dtype)
        self._homes = [
            (module._parameters, key, (shard, whole, Resharded(whole, f"{name}.{key}")))
            for shard, whole in self.weights
            for module, key in homes[shard]
        ]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "FSDP cannot be copied or pickled; allowed: the module before it is wrapped, state_dict(), "
            "gather_full_parameters()"
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
        self._slices = whole.split([n * world_size for n in self._cuts])[::2]
        self._own = self._own_rows(self._shards)
        for parameter, piece, mine, values in zip(parameters, self._slices, self._own, own, strict=True):
            # .data: what autograd keeps must not notice that the memory is filled again.
            view = piece[: parameter.numel()].view(parameter.shape).data
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

    def _padded_slices(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Of a buffer laid out as that of the shards, the slice of each weight with its padding rows."""
        return buffer.split(self._cuts)[::2]

    def _own_rows(self, buffer: Tensor) -> list[Tensor]:
        """Likewise the slice of each weight that this rank holds, in its shape."""
        parts = buffer.split(self._own_cuts)[::2]
        return [part.view(shape) for part, shape in zip(parts, self._own_shapes, strict=True)]

    def start_gather(self) -> None:
        """Fill the whole weights from the shards of all ranks, beside the computation."""
        self._take_back_replaced_data()
        self.is_gathered, self._is_waited_for = True, False
        # Memory of the computation's own stream: it returns there when it is freed.
        self._memory.resize_(self.nbytes)
        with self._gather_stream:
            shards = self._shards.to(self._dtype)
            self._gathering = self._gather_stream.send(ALL_GATHER, self._slices, self._padded_slices(shards))
            if self._gather_stream.cuda is not None:
                self._gathered = self._gather_stream.cuda.record_event()
            else:
                self._sent = shards  # Gloo reads it until it is done
        self.pointer, self.versions = self._memory.data_ptr(), self.versions_now()

    def versions_now(self) -> int:
        """Grows when a shard is written to, as an optimizer does."""
        return sum(weight.parameter._version for weight in self.weights)

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
        if self._gather_stream.cuda is not None:
            torch.cuda.current_stream().wait_event(self._gathered)
        for work in self._gathering:
            work.wait()
        self._is_waited_for, self._sent = True, None
        self._gathering = []  # what was waited for still holds its tensors

    def _show(self, which: int) -> None:
        for parameters, key, values in self._homes:
            parameters[key] = values[which]

    reshard = partialmethod(_show, 0)  # the modules offer their shards, as to an optimizer
    unshard = partialmethod(_show, 1)  # they compute with the whole weights
    hide = partialmethod(_show, 2)  # they have to be called before they can be computed with

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
        lengths = [self._cuts[2 * n] * dist.get_world_size() for n in self.trainable]
        flat = [self._take_gradient(self.weights[n]).view(-1) for n in self.trainable]
        pairs = zip(flat, lengths, strict=True)
        return Reduction(self, [F.pad(g, (0, n - len(g))) if n > len(g) else g for g, n in pairs])

    def _take_gradient(self, weight: ShardedWeight) -> Tensor:
        gradient, weight.whole.grad = weight.whole.grad, None
        if gradient is None:
            return self._slices[0].new_zeros(weight.whole.shape)
        if gradient.is_sparse:
            raise TypeError("a gradient is sparse; allowed: dense ones, as of nn.Embedding(sparse=False)")
        return gradient.detach().contiguous()

    def gather_full(self) -> Iterator[Tensor]:
        """Every weight whole, in the dtype of its shard, one after the other."""
        self._take_back_replaced_data()
        for weight, piece in zip(self.weights, self._padded_slices(self._shards), strict=True):
            whole = piece.new_empty(dist.get_world_size() * len(piece))
            getattr(dist, ALL_GATHER)(whole, piece)
            yield whole[: weight.whole.numel()].view_as(weight.whole)


class Reduction:
    """The gradients of one group on their way to their ranks. Until it is waited for, it keeps them alive."""

    def __init__(self, group: ParameterGroup, gradients: list[Tensor]):
        self._group, self._gradients = group, gradients
        self._stream = stream = group._reduce_stream
        # In the memory of the computation's stream, which will free it.
        self._target = torch.empty_like(group._shards)
        with stream:
            same = gradients[0].dtype == self._target.dtype
            self._received = (
                self._target if same else torch.empty_like(self._target, dtype=gradients[0].dtype)
            )
            if stream.cuda is None:  # a sum of float16 overflows where its mean does not
                torch._foreach_div_(gradients, dist.get_world_size())
            slices = group._padded_slices(self._received)
            outputs = [slices[number] for number in group.trainable]
            self._works = stream.send(REDUCE_SCATTER, outputs, gradients)
            if stream.cuda is not None:
                self._hand_over()
                self._done = stream.cuda.record_event()

    def wait(self) -> None:
        """What is computed from here on finds the means in every `.grad`."""
        if self._stream.cuda is not None:
            torch.cuda.current_stream().wait_event(self._done)
        else:
            for work in self._works:
                work.wait()
            self._hand_over()
        self._gradients, self._target = [], None

    @torch.no_grad()
    def _hand_over(self) -> None:
        """Let the shards' `.grad` be what was received, or add it to what they have."""
        if self._received is not self._target:
            self._target.copy_(self._received)
        means = self._group._own_rows(self._target)
        for number in self._group.trainable:
            parameter = self._group.weights[number].parameter
            if parameter.grad is None:
                parameter.grad = means[number]
            else:
                parameter.grad.add_(means[number])
        self._received = None
