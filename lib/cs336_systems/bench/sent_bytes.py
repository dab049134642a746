"""What ranks really send, byte by byte: in a ring all-reduce, in a sharded layer.

All run over Gloo. What is counted may be defined in a notebook: cloudpickle takes its classes by value.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336_systems.checks.ring_checks import Ring
from cs336_systems.measure.collective_calls import pass_on, watch_collectives
from cs336_systems.model import SwiGLU
from cs336_systems.parallel import WorkerContext, launch

Rows = list[dict[str, Any]]
MakeLayer = Callable[[SwiGLU, DeviceMesh], nn.Module | None]


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


def count_ring_bytes(world_sizes: Sequence[int], *, elements: int) -> Rows:
    """Run RINGS on a float32 tensor, on each number of ranks.

    Returns:
        One dictionary for each ring, world size and rank: ring, world_size, rank, messages, sent_bytes, and
        right: it ends with the sum.

    Raises:
        ValueError: there is no world size, or one is no whole number from 1 on.
    """
    if not world_sizes or not all(isinstance(n, int) and n >= 1 for n in world_sizes):
        raise ValueError(f"world_sizes is {world_sizes}; allowed: whole numbers, 1 or more")
    return _on_ranks(_count_rings, max(world_sizes), tuple(world_sizes), elements)


def _count_rings(context: WorkerContext, world_sizes: Sequence[int], elements: int) -> Rows:
    rows = []
    for n in world_sizes:
        group = dist.new_group(range(n))
        for name, ring in RINGS.items() if context.rank < n else ():
            tensors = torch.arange(float(elements)) + torch.arange(float(n))[:, None]
            total, messages = _run(ring(tensors[context.rank], context.rank, n), group)
            key = {"ring": name, "world_size": n, "rank": context.rank}
            sent = {"messages": len(messages), "sent_bytes": sum(messages)}
            rows.append(key | sent | {"right": total.equal(tensors.sum(0))})
    return rows


def _run(ring: Iterator[Tensor], group: Any) -> tuple[Tensor, list[int]]:
    """What the ring ends with, and the bytes of each tensor that it sends."""
    arrived, messages = None, []
    while True:
        try:
            leaving = ring.send(arrived).contiguous()
        except StopIteration as end:
            return end.value, messages
        # Ranks of one message may hold parts of different sizes: the size goes ahead of the part.
        size = torch.empty(1, dtype=torch.long)
        pass_on(torch.tensor([leaving.numel()]), size, group)
        arrived = leaving.new_empty(int(size))
        messages.append(pass_on(leaving, arrived, group))


def count_sent_bytes(
    layers: Mapping[str, MakeLayer],
    meshes: Sequence[tuple[int, int]],
    *,
    d_model: int,
    d_ff: int,
    tokens: int,
) -> Rows:
    """Run a forward and a backward of sharded SwiGLU layers, in bfloat16, on every mesh.

    Args:
        layers: by name, what makes one on each rank: called with the whole layer, equal on all, and the mesh,
            whose axes are "x", along which the tokens are split, and "y". It makes None on a mesh that is not
            for it. A layer's finish_gradient_synchronization() belongs to backward.
        meshes: (X, Y), one after the other.
        tokens: of all ranks together.

    Returns:
        One dictionary for each collective of each rank: layer, X, Y, rank, pass, collective, ranks (in it),
        sent_bytes, error (of output and input gradient against the whole layer, relative).

    Raises:
        ValueError: there is no mesh, X or Y is no whole number from 1 on, or X does not divide the tokens.
    """
    if not meshes or not all(isinstance(size, int) and size >= 1 for mesh in meshes for size in mesh):
        raise ValueError(f"meshes is {meshes}; allowed: pairs of whole numbers, 1 or more")
    for x, _ in meshes:
        if tokens % x:
            raise ValueError(f"tokens is {tokens}; allowed: a multiple of {x}, the ranks that share them")
    made, world_size = cloudpickle.dumps(dict(layers)), max(x * y for x, y in meshes)
    return _on_ranks(_count_layers, world_size, made, tuple(meshes), (d_model, d_ff, tokens))


def _count_layers(
    context: WorkerContext, made: bytes, meshes: Sequence[tuple[int, int]], sizes: tuple[int, int, int]
) -> Rows:
    layers: dict[str, MakeLayer] = cloudpickle.loads(made)
    d_model, d_ff, tokens = sizes
    rows = []
    for x, y in meshes:
        mesh = DeviceMesh("cpu", torch.arange(x * y).view(x, y), mesh_dim_names=("x", "y"))
        if context.rank < x * y:
            torch.manual_seed(0)
            full = SwiGLU(d_model, d_ff, dtype=torch.bfloat16)
            mine = context.rank // y  # of the shares of the tokens
            shares = torch.randn(2, x, tokens // x, d_model, dtype=torch.bfloat16)[:, mine]
            for name, make_layer in layers.items():
                layer = make_layer(deepcopy(full), mesh)
                key = {"layer": name, "X": x, "Y": y, "rank": context.rank}
                rows += [key | row for row in _passes(layer, full, *shares)] if layer is not None else []
    return rows


def _passes(layer: nn.Module, full: SwiGLU, inputs: Tensor, gradient: Tensor) -> Rows:
    mine, whole = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    with watch_collectives(as_rings=True) as sent:
        output = layer(mine)
        in_forward = len(sent)
        output.backward(gradient)
        getattr(layer, "finish_gradient_synchronization", lambda: None)()
    expected = full(whole)
    expected.backward(gradient)
    error = max(_relative(output, expected), _relative(mine.grad, whole.grad))
    passes = ["forward"] * in_forward + ["backward"] * (len(sent) - in_forward)
    return [
        {"pass": pass_, "collective": one.collective, "ranks": one.ranks, "sent_bytes": one.sent_bytes}
        | {"error": error}
        for pass_, one in zip(passes, sent, strict=True)
    ]


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = (found - expected).float().norm() / expected.float().norm()
    return difference.item() if not difference.isnan() else math.inf


def _on_ranks(worker: Callable[..., Rows], world_size: int, *arguments: Any) -> Rows:
    """The rows of all ranks, by rank."""
    by_rank = launch(worker, world_size, *arguments, backend="gloo", timeout_s=120.0)
    return [row for rows in by_rank for row in rows]
