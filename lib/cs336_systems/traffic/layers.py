"""What sharded layers send: each of their collectives as a ring whose sends are counted."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cs336_systems.model import SwiGLU
from cs336_systems.parallel import WorkerContext, launch
from cs336_systems.traffic.watch import watch_collectives

Rows = list[dict[str, Any]]
MakeLayer = Callable[[SwiGLU, DeviceMesh], nn.Module | None]


def count_sent_bytes(
    layers: Mapping[str, MakeLayer],
    meshes: Sequence[tuple[int, int]],
    **shape: int,
) -> Rows:
    """Run sharded SwiGLU layers in bfloat16 on every mesh, each collective as a ring of counted sends.

    Args:
        layers: by name, what makes one on each rank: called with the whole layer, equal on all, and the mesh,
            whose axes are "x", along which the tokens are split, and "y". It makes None on a mesh that is not
            for it. A layer's finish_gradient_synchronization() belongs to backward.
        meshes: (X, Y), one after the other; X divides the tokens.
        shape: d_model, d_ff, and tokens, of all ranks together.

    Returns:
        One dictionary for each collective of each rank: layer, X, Y, rank, pass, collective, ranks (in it),
        sent_bytes, error (of output and input gradient against the whole layer, relative).
    """
    ranks = max(x * y for x, y in meshes)
    how = {"backend": "gloo", "timeout_s": 120.0}
    by_rank = launch(_on_meshes, ranks, dict(layers), meshes, **how, **shape)
    return [row for rows in by_rank for row in rows]


def _on_meshes(
    context: WorkerContext,
    layers: Mapping[str, MakeLayer],
    meshes: Sequence[tuple[int, int]],
    d_model: int,
    d_ff: int,
    tokens: int,
) -> Rows:
    rows = []
    for x, y in meshes:
        # Every rank makes the mesh, as its groups are made by all; those outside then do nothing.
        mesh = DeviceMesh("cpu", torch.arange(x * y).view(x, y), mesh_dim_names=("x", "y"))
        if context.rank >= x * y:
            continue
        # The same layer and the same tokens on every rank, whose share is taken from them.
        torch.manual_seed(0)
        full = SwiGLU(d_model, d_ff, dtype=torch.bfloat16)
        shares = torch.randn(2, x, tokens // x, d_model, dtype=torch.bfloat16)
        inputs, gradient = shares[:, context.rank // y]
        for name, make_layer in layers.items():
            layer = make_layer(deepcopy(full), mesh)
            if layer is not None:
                key = {"layer": name, "X": x, "Y": y, "rank": context.rank}
                rows += [key | row for row in _messages(layer, full, inputs, gradient)]
    return rows


def _messages(
    layer: nn.Module, full: SwiGLU, inputs: Tensor, gradient: Tensor
) -> Iterator[dict[str, Any]]:
    """The collectives of a layer's two passes, and how far off they leave it."""
    x = inputs.clone().requires_grad_()
    with watch_collectives(as_rings=True) as messages:
        output = layer(x)
        in_forward = len(messages)
        output.backward(gradient)
        getattr(layer, "finish_gradient_synchronization", lambda: None)()
    whole_x = inputs.clone().requires_grad_()
    whole_output = full(whole_x)
    whole_output.backward(gradient)
    error = max(_error(output, whole_output), _error(x.grad, whole_x.grad))
    for number, message in enumerate(messages):
        yield {
            "pass": "forward" if number < in_forward else "backward",
            "collective": message.collective,
            "ranks": message.ranks,
            "sent_bytes": message.sent_bytes,
            "error": error,
        }


def _error(result: Tensor, expected: Tensor) -> float:
    difference = (result - expected).float().norm() / expected.float().norm()
    return difference.item() if not difference.isnan() else math.inf
