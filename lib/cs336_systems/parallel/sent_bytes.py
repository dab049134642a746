"""What each rank sends in a forward and a backward of a sharded layer, byte by byte, over Gloo."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336_systems.model import SwiGLU
from cs336_systems.parallel.collective_calls import watch_collectives
from cs336_systems.parallel.launch import WorkerContext, launch

Rows = list[dict[str, Any]]
MakeLayer = Callable[[SwiGLU, DeviceMesh], nn.Module | None]


def count_sent_bytes(
    layers: Mapping[str, MakeLayer],
    meshes: Sequence[tuple[int, int]],
    *,
    d_model: int,
    d_ff: int,
    tokens: int,
) -> Rows:
    """Run sharded SwiGLU layers in bfloat16 on every mesh, each collective as a ring of counted sends.

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
    world_size, what = max(x * y for x, y in meshes), (dict(layers), tuple(meshes), (d_model, d_ff, tokens))
    by_rank = launch(_count, world_size, *what, backend="gloo", timeout_s=120.0)
    return [row for rows in by_rank for row in rows]


def _count(
    context: WorkerContext,
    layers: Mapping[str, MakeLayer],
    meshes: Sequence[tuple[int, int]],
    sizes: tuple[int, int, int],
) -> Rows:
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
    return [
        {"pass": "forward" if number < in_forward else "backward", "collective": one.collective}
        | {"ranks": one.ranks, "sent_bytes": one.sent_bytes, "error": error}
        for number, one in enumerate(sent)
    ]


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = (found - expected).float().norm() / expected.float().norm()
    return difference.item() if not difference.isnan() else math.inf
