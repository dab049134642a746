"""What the ranks of a mesh send in a forward and a backward of one SwiGLU layer, byte by byte."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle  # takes classes of a notebook by value
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336_systems.measure.sent_bytes import ring_collectives
from cs336_systems.model import SwiGLU
from cs336_systems.parallel import WorkerContext, launch


def count_sent_bytes(
    make_layer: Callable[[SwiGLU, DeviceMesh], nn.Module],
    meshes: Sequence[tuple[int, int]],
    *,
    d_model: int,
    d_ff: int,
    tokens: int,
    timeout_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Run a sharded layer in bfloat16 over Gloo on every mesh, its collectives as rings of counted sends.

    One launch of as many workers as the largest mesh has places; smaller meshes use the first of them.

    Args:
        make_layer: called on each rank with the whole layer, equal on all, and the mesh, whose axes are "x",
            along which the tokens are split, and "y". It may be defined in a notebook.
        meshes: (X, Y), one after the other.
        tokens: of all ranks together.

    Returns:
        One dictionary for each collective of each rank: X, Y, rank, pass, collective, ranks (that took part),
        sent_bytes, error (of output and input gradient against the whole layer, relative).

    Raises:
        ValueError: X or Y is no whole number from 1 on, or X does not divide the tokens.
    """
    for x, y in meshes:
        if not all(isinstance(size, int) and size >= 1 for size in (x, y)):
            raise ValueError(f"the mesh is {x} x {y}; allowed: whole numbers, 1 or more")
        if tokens % x:
            raise ValueError(f"tokens is {tokens}; allowed: a multiple of {x}, the ranks that share them")
    made = cloudpickle.dumps(make_layer)
    world_size = max(x * y for x, y in meshes)
    sizes = (d_model, d_ff, tokens)
    by_rank = launch(_count, world_size, made, tuple(meshes), sizes, backend="gloo", timeout_s=timeout_s)
    return [row for rows in by_rank for row in rows]


def _count(
    context: WorkerContext, made: bytes, meshes: Sequence[tuple[int, int]], sizes: tuple[int, int, int]
) -> list[dict[str, Any]]:
    make_layer = cloudpickle.loads(made)
    d_model, d_ff, tokens = sizes
    rows = []
    for x, y in meshes:
        mesh = DeviceMesh("cpu", torch.arange(x * y).view(x, y), mesh_dim_names=("x", "y"))
        if context.rank < x * y:
            torch.manual_seed(0)
            full = SwiGLU(d_model, d_ff, dtype=torch.bfloat16)
            inputs, gradient = torch.randn(2, tokens, d_model, dtype=torch.bfloat16)
            share = slice(None, None)
            if x > 1:
                size = tokens // x
                share = slice(mesh.get_local_rank("x") * size, (mesh.get_local_rank("x") + 1) * size)
            key = {"X": x, "Y": y, "rank": context.rank}
            rows += [key | row for row in _passes(make_layer, full, mesh, inputs[share], gradient[share])]
    return rows


def _passes(
    make_layer: Callable, full: SwiGLU, mesh: DeviceMesh, inputs: Tensor, gradient: Tensor
) -> list[dict[str, Any]]:
    layer = make_layer(full, mesh)
    mine, whole = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    with ring_collectives() as sent:
        output = layer(mine)
        in_forward = len(sent)
        output.backward(gradient)
    expected = full(whole)
    expected.backward(gradient)
    error = max(_relative(output, expected), _relative(mine.grad, whole.grad))
    return [
        {
            "pass": "forward" if number < in_forward else "backward",
            "collective": each.collective,
            "ranks": each.ranks,
            "sent_bytes": each.bytes,
            "error": error,
        }
        for number, each in enumerate(sent)
    ]


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = (found - expected).float().norm() / expected.float().norm()
    return difference.item() if not difference.isnan() else math.inf
