"""What the ranks send to each other: the collectives that are called, carried out, left out, or counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Message:
    """One call of a collective: its largest buffer on this rank in bytes, and that buffer's dtype.

    sent_bytes: what this rank sent to its neighbour, where collectives are carried out as rings.
    """

    collective: str
    ranks: int
    bytes: int
    dtype: str
    sent_bytes: int | None


# The handle of a collective that needs no waiting: it is over, or was not carried out.
_DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


@contextmanager
def watch_collectives(*, send: bool = True, as_rings: bool = False) -> Iterator[list[Message]]:
    """A list that fills with the collectives called inside, by whoever calls them as dist.all_reduce(...).

    Args:
        send: False leaves them out: every buffer stays as it is. What is then computed is wrong, but takes
            the time that it takes with nothing sent.
        as_rings: carry them out as rings, hop by hop, and count every send:
            Gloo and NCCL do not tell what they put on the wire. Sums and means of CPU tensors.
    """
    messages: list[Message] = []

    def watched(function: Callable, ring: Callable[..., int]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature(ring).bind(*args, **kwargs).arguments
            buffers = [value for value in given.values() if isinstance(value, Tensor)]
            largest = max(buffers, key=lambda buffer: buffer.nbytes)
            result = _DONE if given.pop("async_op", False) else None
            sent_bytes = ring(**given) if as_rings else None
            if send and not as_rings:
                result = function(*args, **kwargs)
            ranks, dtype = dist.get_world_size(given.get("group")), str(largest.dtype).removeprefix("torch.")
            messages.append(Message(ring.__name__, ranks, largest.nbytes, dtype, sent_bytes))
            return result

        return call

    functions = {name: getattr(dist, name) for name in _RINGS if hasattr(dist, name)}
    with patch.multiple(dist, **{name: watched(functions[name], _RINGS[name]) for name in functions}):
        yield messages


def pass_on(leaving: Tensor, arriving: Tensor, group: Any = None) -> int:
    """Send a tensor to the next rank of a ring and receive the previous one's; returns the bytes sent."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    coming = dist.irecv(arriving, group=group, group_src=(rank - 1) % n)
    dist.isend(leaving, group=group, group_dst=(rank + 1) % n).wait()
    coming.wait()
    return leaving.nbytes


# The collectives as rings, with the parameters of torch.distributed. Each returns the bytes that it sent.


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> int:
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    pieces = whole.view(-1).tensor_split(dist.get_world_size(group))
    count = _reduce(pieces, group, op) + _around(pieces, dist.get_rank(group), group, Tensor.copy_)
    tensor.detach().copy_(whole)
    return count


def all_gather(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> int:
    pieces = output_tensor.detach().view(-1).chunk(dist.get_world_size(group))
    pieces[rank := dist.get_rank(group)].copy_(input_tensor.detach().flatten())
    return _around(pieces, rank, group, Tensor.copy_)


def reduce_scatter(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> int:
    pieces = input.detach().flatten().clone().chunk(dist.get_world_size(group))
    count = _reduce(pieces, group, op)
    output.detach().copy_(pieces[dist.get_rank(group)].view_as(output))
    return count


def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> int:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    whole, is_last = tensor.detach().contiguous(), (rank + 1) % n == src
    if rank != src:
        dist.recv(whole, group=group, group_src=(rank - 1) % n)
        tensor.detach().copy_(whole)
    if not is_last:
        dist.send(whole, group=group, group_dst=(rank + 1) % n)
    return 0 if is_last else whole.nbytes


# PyTorch 2.13 renamed two functions; where it has both names, the older calls the newer unseen.
_RINGS = {"all_reduce": all_reduce, "broadcast": broadcast}
_RINGS |= dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), all_gather)
_RINGS |= dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), reduce_scatter)


def _reduce(pieces: tuple[Tensor, ...], group: Any, op: Any) -> int:
    """Add up the pieces of all ranks; rank r ends with piece r."""
    rank = dist.get_rank(group)
    count = _around(pieces, rank - 1, group, Tensor.add_)
    if op == dist.ReduceOp.AVG:
        pieces[rank].div_(len(pieces))
    return count


def _around(pieces: tuple[Tensor, ...], first: int, group: Any, take: Callable[[Tensor, Tensor], Any]) -> int:
    """In each of n - 1 hops pass a piece to the next rank, from `first` on backwards, and take the last's."""
    n, count = len(pieces), 0
    for hop in range(n - 1):
        piece = pieces[(first - hop - 1) % n]
        received = torch.empty_like(piece)
        count += pass_on(pieces[(first - hop) % n], received, group)
        take(piece, received)
    return count
