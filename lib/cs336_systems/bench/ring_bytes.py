"""A ring all-reduce between real processes: what every rank puts on the wire."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle  # takes functions of a notebook by value
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.checks.ring_checks import Ring
from cs336_systems.parallel import WorkerContext, launch


def whole_ring(mine: Tensor, rank: int, n: int) -> Iterator[Tensor]:
    """Pass on whole tensors as they arrive, and add them up: n - 1 messages of the tensor's size."""
    total, moving = mine.clone(), mine
    for _ in range(n - 1):
        moving = yield moving
        total += moving
    return total


def usual_ring(mine: Tensor, rank: int, n: int) -> Iterator[Tensor]:
    """Add up a part on each rank, then spread the sums: 2 (n - 1) messages of one n-th."""
    parts = mine.clone().tensor_split(n)
    for hop in range(2 * (n - 1)):
        arrived, target = (yield parts[(rank - hop) % n]), parts[(rank - hop - 1) % n]
        target.copy_(target + arrived if hop < n - 1 else arrived)
    return torch.cat(parts)


RINGS: dict[str, Ring] = {"whole tensors": whole_ring, "parts": usual_ring}


def count_ring_bytes(
    world_sizes: Sequence[int], *, elements: int, rings: Mapping[str, Ring] = RINGS, timeout_s: float = 120.0
) -> list[dict[str, Any]]:
    """Run ring all-reduces of a float32 tensor over Gloo, in one launch of the largest world size.

    Args:
        world_sizes: numbers of ranks, one after the other.
        elements: of the tensor.
        rings: by name, as `checks.check_ring` takes them; they may be defined in a notebook.

    Returns:
        One dictionary for each ring, world size and rank: ring, world_size, rank, messages, sent_bytes, and
        right: it ends with the sum.

    Raises:
        ValueError: a world size is no whole number from 1 on.
    """
    if not world_sizes:
        raise ValueError("world_sizes is empty; allowed: one or more")
    for n in world_sizes:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"world size is {n!r}; allowed: a whole number, 1 or more")
    arguments = (cloudpickle.dumps(dict(rings)), tuple(world_sizes), elements)
    by_rank = launch(_count, max(world_sizes), *arguments, backend="gloo", timeout_s=timeout_s)
    return [row for rows in by_rank for row in rows]


def _count(
    context: WorkerContext, rings: bytes, world_sizes: Sequence[int], elements: int
) -> list[dict[str, Any]]:
    rows = []
    for name, ring in cloudpickle.loads(rings).items():
        for n in world_sizes:
            if context.rank < n:
                tensors = torch.arange(float(elements)) + torch.arange(float(n))[:, None]
                messages: list[int] = []
                total = _run(ring(tensors[context.rank], context.rank, n), context.rank, n, messages)
                rows.append(
                    {
                        "ring": name, "world_size": n, "rank": context.rank, "messages": len(messages),
                        "sent_bytes": sum(messages), "right": total.equal(tensors.sum(0)),
                    }
                )  # fmt: skip
    return rows


def _run(ring: Iterator[Tensor], rank: int, n: int, messages: list[int]) -> Tensor:
    """Send each tensor that the generator yields to the next rank; its bytes are noted in `messages`."""
    arrived = None
    while True:
        try:
            leaving = ring.send(arrived).contiguous()
        except StopIteration as end:
            return end.value
        # Ranks of one message may hold parts of different sizes: the size goes ahead of the part.
        sizes = torch.tensor([leaving.numel()]), torch.empty(1, dtype=torch.long)
        _exchange(*sizes, rank, n)
        arrived = leaving.new_empty(int(sizes[1]))
        _exchange(leaving, arrived, rank, n)
        messages.append(leaving.nbytes)


def _exchange(leaving: Tensor, arriving: Tensor, rank: int, n: int) -> None:
    coming = dist.irecv(arriving, src=(rank - 1) % n)
    dist.isend(leaving, dst=(rank + 1) % n).wait()
    coming.wait()
