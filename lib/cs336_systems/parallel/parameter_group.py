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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn import functional as F

from cs336_systems.parallel.ddp import ALL_GATHER, REDUCE_SCATTER, as_message, ready_for_mean
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
            self._reached = torch.cuda.Event()
            self._inside = torch.cuda.stream(self.cuda)

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
        **options: Any,
    ) -> Callable[[], Any]:
        """Send one message a pair, then call `then`; returns what waits for both.

        Over Gloo `then` is called in that wait, which keeps the inputs for Gloo's threads. Over NCCL it is
        called at once: its kernels are queued behind the messages, and the wait keeps what it uses.
        """
        send = getattr(dist, collective)
        pairs = zip(outputs, inputs, strict=True)
        if self.cuda is None:
            works = [send(*pair, **options, async_op=True) for pair in pairs]
            return partial(_wait_for_threads, works, inputs, then)
        # Several in one kernel.
        with _coalescing_manager() if len(outputs) > 1 else contextlib.nullcontext():
            for pair in pairs:
                send(*pair, **options)
        then()
        return partial(_wait_for_event, self.cuda.record_event(), then)


def _wait_for_threads(works: list[dist.Work], inputs: Any, then: Callable[[], Any]) -> None:
    # Until here Gloo's threads read the inputs, which nobody else may hold.
    for work in works:
        work.wait()
    then()


def _wait_for_event(event: torch.cuda.Event, then: Any) -> None:
    # Until here the stream may use what `then` holds: freed earlier, its memory would be given away.
    torch.cuda.current_stream().wait_event(event)


class Home(NamedTuple):
    """Where a module has a parameter."""

    parameter: nn.Parameter
    user: nn.Module  # in whose forward it is used: its unit, or else the holder
    holder: nn.Module
    key: str


class ShardedWeight(NamedTuple):
    """A weight in two parameters, of which a module has the one that it needs."""

    parameter: nn.Parameter  # the module's own, which the optimizer sees: this rank's rows
    whole: nn.Parameter  # autograd's leaf; it has memory only while its group is gathered


class State(Enum):
    """Of a parameter group.

    | from | to | when |
    |:--|:--|:--|
    | SHARDED | GATHERED | forward or backward is about to reach it |
    | GATHERED | SHARDED | its forward is done and backward is not about to want it, or it is stale |
    | GATHERED | IN_BACKWARD | backward has reached a result of its modules, or read a note |
    | IN_BACKWARD | SHARDED | the gradients of all its weights are there, or backward has ended |
    """

    SHARDED = auto()  # the whole weights have no memory
    GATHERED = auto()  # they have, and are there or on their way
    IN_BACKWARD = auto()


class ParameterGroup:
    """Some weights, of which every rank holds its rows, and all rows while the group is gathered."""

    @torch.no_grad()
    def __init__(
        self,
        homes: Collection[Home],
        names: Mapping[nn.Module, str],
        dtype: torch.dtype | None,
        gather_stream: CommunicationStream,
        reduce_stream: CommunicationStream,
    ):
        """homes: of its parameters. names: of modules, for errors. dtype: of whole weights; None: as shards.

        With N ranks the two buffers are laid out alike, and a parameter becomes a view of the first:

            _shards    | a: this rank's rows | gap    | b: this rank's rows | gap    | ...    stays
            _memory    | a: N times as many  | N gaps | b: N times as many  | N gaps | ...    while gathered
        """
        # Their forward needs the group.
        self.users = list(dict.fromkeys(home.user for home in homes))
        self.name = " and ".join(names[user] for user in self.users)
        self.state = State.SHARDED
        # Which weights have a gradient of this backward pass.
        self.ready = set[int]()
        # Forward passes under way, and the place in the order of forward.
        self.calls = 0
        self.position = 0
        self._gather_stream = gather_stream
        self._reduce_stream = reduce_stream
        # What waits for the gather that is on its way.
        self._arrival: Callable[[], Any] | None = None
        parameters = list(dict.fromkeys(home.parameter for home in homes))
        first = parameters[0]
        self._dtype = dtype or first.dtype
        self._lay_out(parameters)
        ranks = dist.get_world_size()
        self._shards = first.new_zeros(sum(self._cuts))
        buffer = first.new_empty(sum(self._cuts) * ranks, dtype=self._dtype)
        self._memory = buffer.untyped_storage()
        self.nbytes = buffer.nbytes
        self._slices = buffer.split([length * ranks for length in self._cuts])[::2]
        self.weights: list[ShardedWeight] = []
        shards = self._own_rows(self._shards)
        for parameter, slice_, shard in zip(parameters, self._slices, shards, strict=True):
            # .data: what autograd keeps must not notice that the memory is filled again. The first gather
            # fills it, and sets `pointer` and `versions`.
            whole = slice_[: parameter.numel()].view(parameter.shape).data
            self.weights.append(ShardedWeight(parameter, nn.Parameter(whole)))
            parameter.data = shard.copy_(_rows_of_rank(parameter))
        self._memory.resize_(0)
        wholes = dict(self.weights)
        self._homes = [
            (home.holder._parameters, home.key, home.parameter, wholes[home.parameter])
            for home in homes
        ]

    def _lay_out(self, parameters: Sequence[Tensor]) -> None:
        """Where the rows of this rank lie in the buffer of shards."""
        step = ALIGNMENT_BYTES // min(parameters[0].element_size(), self._dtype.itemsize)
        # Of every shard its length, and the gap to the next: `split` takes both, and [::2] leaves gaps out.
        self._cuts: list[int] = []
        # Of every shard shape, strides and start: what `as_strided` takes.
        self._places: list[tuple] = []
        for parameter in parameters:
            shape = _rows_of_rank(parameter).shape
            strides = torch.empty(shape, device="meta").stride()
            self._places.append((shape, strides, sum(self._cuts)))
            length = rows_a_rank(parameter) * math.prod(parameter.shape[1:])
            self._cuts += [length, -length % step]

    def _padded_slices(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Of a buffer laid out as that of the shards, the slice of each weight with its padding rows."""
        return buffer.split(self._cuts)[::2]

    def _own_rows(self, buffer: Tensor) -> list[Tensor]:
        """Likewise the slice of each weight that this rank holds, in its shape."""
        return [buffer.as_strided(*place) for place in self._places]

    def start_gather(self) -> None:
        """Fill the whole weights from the shards of all ranks, beside the computation."""
        self.state = State.GATHERED
        # Memory of the computation's own stream: it returns there when it is freed.
        self._memory.resize_(self.nbytes)
        with self._gather_stream as stream:
            shards = self._padded_slices(self._shards.to(self._dtype))
            self._arrival = stream.start(ALL_GATHER, self._slices, shards)
        self.pointer = self._memory.data_ptr()
        self.versions = self.versions_now()

    def versions_now(self) -> int:
        """Grows when a shard is written to, as an optimizer does."""
        return sum(weight.parameter._version for weight in self.weights)

    def wait_for_gather(self) -> None:
        """What is computed from here on finds the whole weights."""
        if self._arrival is not None:
            self._arrival()
            self._arrival = None

    def reshard(self) -> None:
        """The modules offer their shards, as to an optimizer."""
        for parameters, key, shard, _ in self._homes:
            parameters[key] = shard

    def unshard(self) -> None:
        """They compute with the whole weights."""
        for parameters, key, _, whole in self._homes:
            parameters[key] = whole

    def free(self) -> None:
        """Give the memory of the whole weights back."""
        # A message may still be writing to it.
        self.wait_for_gather()
        self._memory.resize_(0)
        self.state = State.SHARDED
        # Of a pass that did not reach all weights.
        self.ready.clear()
        self.reshard()

    def start_reduction(self) -> tuple[list[Tensor], Callable[[], Any]]:
        """Send whole gradients to their ranks; returns them, and a wait for the means in every `.grad`."""
        pairs = zip(self.weights, self._slices, strict=True)
        gradients = [self._take_gradient(weight, len(slice_)) for weight, slice_ in pairs]
        # In the memory of the computation's stream, which will free it.
        means = torch.empty_like(self._shards)
        with self._reduce_stream as stream:
            dtype = gradients[0].dtype
            received = means if dtype == means.dtype else torch.empty_like(means, dtype=dtype)
            operation = ready_for_mean(gradients, stream.backend)
            slices = self._padded_slices(received)
            hand_over = partial(self._hand_over, received, means)
            wait = stream.start(REDUCE_SCATTER, slices, gradients, hand_over, op=operation)
        return gradients, wait

    def _take_gradient(self, weight: ShardedWeight, length: int) -> Tensor:
        """Of the whole weight, flat, with its padding rows."""
        gradient = weight.whole.grad
        weight.whole.grad = None
        if gradient is None:
            return weight.whole.new_zeros(length)
        flat = as_message(gradient).view(-1)
        return F.pad(flat, (0, length - len(flat))) if length > len(flat) else flat

    @torch.no_grad()
    def _hand_over(self, received: Tensor, means: Tensor) -> None:
        """Give every shard its mean, and call its hooks."""
        if received is not means:
            # On a GPU faster than copy_.
            torch._foreach_copy_([means], [received])
        for (shard, _), mean in zip(self.weights, self._own_rows(means), strict=True):
            shard.grad = mean if shard.grad is None else shard.grad.add_(mean)
        for shard, _ in self.weights:
            for hook in (shard._post_accumulate_grad_hooks or {}).values():
                hook(shard)

    def gather_full(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter, and it whole, in the dtype of its shard."""
        for weight, rows in zip(self.weights, self._padded_slices(self._shards), strict=True):
            whole = rows.new_empty(dist.get_world_size() * len(rows))
            getattr(dist, ALL_GATHER)(whole, rows)
            yield weight.parameter, whole[: weight.whole.numel()].view_as(weight.whole)


def rows_a_rank(weight: Tensor) -> int:
    """Padding included."""
    return -(-len(weight) // dist.get_world_size())


def _rows_of_rank(weight: Tensor) -> Tensor:
    rows = rows_a_rank(weight)
    return weight[dist.get_rank() * rows :][:rows]
