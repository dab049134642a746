"""Bytes that leave a rank: each collective as a ring of sends, and every send counted.

Gloo and NCCL do not tell what they put on the wire. Inside `ring_collectives` the collectives are carried out
by the rings of `accounting.bus_factor`, hop by hop, so what is counted is what was really sent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.measure.collective_calls import Done


@dataclass(frozen=True)
class Sent:
    """One collective: among how many ranks it ran, and the bytes that this one sent to its neighbour."""

    collective: str
    ranks: int
    bytes: int


@contextmanager
def ring_collectives() -> Iterator[list[Sent]]:
    """A list that fills with the collectives called inside as dist.all_reduce(...) and the like.

    All-reduce, all-gather, reduce-scatter and broadcast of CPU tensors, sums and means.
    """
    sent: list[Sent] = []

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Done | None:
        whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        pieces = whole.view(-1).tensor_split(dist.get_world_size(group))
        count = _reduce(pieces, group, op) + _spread(pieces, group)
        tensor.detach().copy_(whole)
        return note("all_reduce", count, group, async_op)

    def all_gather(
        output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Done | None:
        pieces = output_tensor.detach().view(-1).chunk(dist.get_world_size(group))
        pieces[dist.get_rank(group)].copy_(input_tensor.detach().flatten())
        return note("all_gather", _spread(pieces, group), group, async_op)

    def reduce_scatter(
        output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Done | None:
        pieces = input.detach().flatten().clone().chunk(dist.get_world_size(group))
        count = _reduce(pieces, group, op)
        output.detach().copy_(pieces[dist.get_rank(group)].view_as(output))
        return note("reduce_scatter", count, group, async_op)

    def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Done | None:
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        whole, last = tensor.detach().contiguous(), (rank + 1) % n == src
        if rank != src:
            dist.recv(whole, group=group, group_src=(rank - 1) % n)
            tensor.detach().copy_(whole)
        if not last:
            dist.send(whole, group=group, group_dst=(rank + 1) % n)
        return note("broadcast", 0 if last else whole.nbytes, group, async_op)

    def note(collective: str, count: int, group: Any, async_op: bool) -> Done | None:
        sent.append(Sent(collective, dist.get_world_size(group), count))
        return Done() if async_op else None

    rings: dict[str, Callable] = {"all_reduce": all_reduce, "broadcast": broadcast}
    # PyTorch 2.13 renamed these two and kept the old names.
    rings |= {"all_gather_into_tensor": all_gather, "all_gather_single": all_gather}
    rings |= {"reduce_scatter_tensor": reduce_scatter, "reduce_scatter_single": reduce_scatter}
    with patch.multiple(dist, **{name: ring for name, ring in rings.items() if hasattr(dist, name)}):
        yield sent


def _reduce(pieces: tuple[Tensor, ...], group: Any, op: Any) -> int:
    """Add up the pieces of all ranks; rank r ends with piece r. Returns the bytes sent, as does _spread."""
    rank = dist.get_rank(group)
    count = _around(pieces, rank - 1, group, lambda piece, received: piece.add_(received))
    if op == dist.ReduceOp.AVG:
        pieces[rank].div_(len(pieces))
    return count


def _spread(pieces: tuple[Tensor, ...], group: Any) -> int:
    """Hand rank r's piece r on until every rank has all pieces."""
    return _around(pieces, dist.get_rank(group), group, lambda piece, received: piece.copy_(received))


def _around(pieces: tuple[Tensor, ...], first: int, group: Any, take: Callable[[Tensor, Tensor], Any]) -> int:
    """In each of n - 1 hops pass a piece to the next rank, from `first` on backwards, and take the last's."""
    rank, n, count = dist.get_rank(group), len(pieces), 0
    for hop in range(n - 1):
        out, piece = pieces[(first - hop) % n], pieces[(first - hop - 1) % n]
        received = torch.empty_like(piece)
        work = dist.irecv(received, group=group, group_src=(rank - 1) % n)
        dist.isend(out, group=group, group_dst=(rank + 1) % n).wait()
        work.wait()
        count += out.nbytes
        take(piece, received)
    return count
