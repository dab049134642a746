"""What the ranks of a mesh send in a forward and a backward of one SwiGLU layer, byte by byte."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import cloudpickle  # takes classes of a notebook by value
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336_systems.measure.sent_bytes import ring_collectives
from cs336_systems.model import SwiGLU
from cs336_systems.parallel import WorkerContext, launch

MakeLayer = Callable[[SwiGLU, DeviceMesh], nn.Module | None]


def count_sent_bytes(
    layers: Mapping[str, MakeLayer],
    meshes: Sequence[tuple[int, int]],
    *,
    d_model: int,
    d_ff: int,
    tokens: int,
    timeout_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Run sharded layers in bfloat16 over Gloo on every mesh, their collectives as rings of counted sends.

    One launch of as many workers as the largest mesh has places; smaller meshes use the first of them.

    Args:
        layers: by name, what makes one on each rank: called with the whole layer, equal on all, and the mesh,
            whose axes are "x", along which the tokens are split, and "y". It may be defined in a notebook,
            and makes None on a mesh that is not for it. A layer's finish_gradient_synchronization() belongs
            to backward.
        meshes: (X, Y), one after the other.
        tokens: of all ranks together.

    Returns:
        One dictionary for each collective of each rank: layer, X, Y, rank, pass, collective, ranks (in it),
        sent_bytes, error (of output and input gradient against the whole layer, relative).

    Raises:
        ValueError: X or Y is no whole number from 1 on, or X does not divide the tokens.
    """
    if not meshes:
        raise ValueError("meshes is empty; allowed: one or more")
    for x, y in meshes:
        if not all(isinstance(size, int) and size >= 1 for size in (x, y)):
            raise ValueError(f"the mesh is {x} x {y}; allowed: whole numbers, 1 or more")
        if tokens % x:
            raise ValueError(f"tokens is {tokens}; allowed: a multiple of {x}, the ranks that share them")
    made = cloudpickle.dumps(dict(layers))
    world_size = max(x * y for x, y in meshes)
    sizes = (d_model, d_ff, tokens)
    by_rank = launch(_count, world_size, made, tuple(meshes), sizes, backend="gloo", timeout_s=timeout_s)
    return [row for rows in by_rank for row in rows]


def _count(
    context: WorkerContext, made: bytes, meshes: Sequence[tuple[int, int]], sizes: tuple[int, int, int]
) -> list[dict[str, Any]]:
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


def _passes(layer: nn.Module, full: SwiGLU, inputs: Tensor, gradient: Tensor) -> list[dict[str, Any]]:
    mine, whole = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    with ring_collectives() as sent:
        output = layer(mine)
        in_forward = len(sent)
        output.backward(gradient)
        getattr(layer, "finish_gradient_synchronization", lambda: None)()
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
