"""The collectives as rings, hop by hop, with every send counted: Gloo and NCCL do not tell what they send.

They have the parameters of torch.distributed (but `src` of a broadcast is a rank of its group), add up
tensors on the CPU whatever `op` is, divide for AVG, and return the bytes that this rank has sent to its
neighbour.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def pass_on(leaving: Tensor, arriving: Tensor, group: Any = None) -> int:
    """Send a tensor to the next rank of a ring and receive the previous one's; returns the bytes sent."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    # Receiving comes first: if all waited in a send, none would receive.
    coming = dist.irecv(arriving, group=group, group_src=(rank - 1) % ranks)
    dist.isend(leaving, group=group, group_dst=(rank + 1) % ranks).wait()
    coming.wait()
    return leaving.nbytes


def all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> int:
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    # Views: what the rings do to the pieces is done to `whole`.
    pieces = whole.view(-1).tensor_split(dist.get_world_size(group))
    sent_bytes = _reduce(pieces, op, group) + _spread(pieces, group)
    tensor.detach().copy_(whole)
    return sent_bytes


def all_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> int:
    pieces = output_tensor.detach().view(-1).chunk(dist.get_world_size(group))
    pieces[dist.get_rank(group)].copy_(input_tensor.detach().flatten())
    return _spread(pieces, group)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> int:
    pieces = input.detach().flatten().clone().chunk(dist.get_world_size(group))
    sent_bytes = _reduce(pieces, op, group)
    output.detach().copy_(pieces[dist.get_rank(group)].view_as(output))
    return sent_bytes


def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> int:
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    whole = tensor.detach().contiguous()
    if rank != src:
        dist.recv(whole, group=group, group_src=(rank - 1) % ranks)
        tensor.detach().copy_(whole)
    following = (rank + 1) % ranks
    if following == src:  # the ring ends here
        return 0
    dist.send(whole, group=group, group_dst=following)
    return whole.nbytes


def _reduce(pieces: Sequence[Tensor], op: Any, group: Any) -> int:
    """Add up the pieces of all ranks; rank r ends with piece r."""
    rank = dist.get_rank(group)
    sent_bytes = _around(pieces, rank - 1, Tensor.add_, group)
    if op == dist.ReduceOp.AVG:
        pieces[rank].div_(len(pieces))
    return sent_bytes


def _spread(pieces: Sequence[Tensor], group: Any) -> int:
    """Rank r has piece r, and every rank ends with all."""
    return _around(pieces, dist.get_rank(group), Tensor.copy_, group)


def _around(
    pieces: Sequence[Tensor], first: int, take: Callable[[Tensor, Tensor], Any], group: Any
) -> int:
    """In each of n - 1 hops pass a piece on, from `first` backwards, and take the previous rank's."""
    sent_bytes = 0
    for hop in range(len(pieces) - 1):
        leaving = pieces[(first - hop) % len(pieces)]
        # What arrives is the previous rank's: one place further back.
        piece = pieces[(first - hop - 1) % len(pieces)]
        arriving = torch.empty_like(piece)
        sent_bytes += pass_on(leaving, arriving, group)
        take(piece, arriving)
    return sent_bytes


# By the names of their functions, of which PyTorch 2.13 renamed two.
RINGS: dict[str, Callable[..., int]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_gather_into_tensor": all_gather,
    "all_gather_single": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "reduce_scatter_single": reduce_scatter,
}
