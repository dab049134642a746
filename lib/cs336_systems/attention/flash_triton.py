"""FlashAttention-2 with our own Triton kernels: the launches, the autograd.Function and what torch.compile needs.

float32 tensors multiply exactly by default and in TF32 after torch.set_float32_matmul_precision("high"): PyTorch's
own switch. The result is deterministic, backward included.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from .inputs import cast_for_autocast, check_inputs
from .kernels_backward import dkdv_kernel, dq_kernel
from .kernels_forward import forward_kernel
from .launch import INTERPRETED, Launch, Shape, describer, four_dims, loadable, on
from .tuning import EXACT, Tile, tile_for

LOG2E = math.log2(math.e)

Layout = tuple[Shape, Shape]  # shape, strides


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """O (..., n_queries, d) in q's dtype and layout; L = logsumexp(scores) (..., n_queries) in float32."""
    if q.dim() > 4:
        o, logsumexp = flash_forward(*(x.flatten(0, -4) for x in (q, k, v)), is_causal)
        return o.reshape(q.shape), logsumexp.reshape(q.shape[:-1])
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter multiplies bfloat16's bit patterns
        o, logsumexp = flash_forward(q.float(), k.float(), v.float(), is_causal)
        return o.to(q.dtype), logsumexp
    o = torch.empty_like(q)
    logsumexp = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    descriptors = _has_copy_engine(q.device)
    q, k, v = (loadable(x, descriptors) for x in (q, k, v))
    layouts = tuple((x.shape, x.stride()) for x in (q, k, v, o))
    plan = _forward_plan(layouts, q.dtype, q.device, is_causal, _precision(q.dtype))
    with on(q.device):
        plan(q, k, v, o, logsumexp)
    return o, logsumexp


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the dtypes and layouts of q, k, v."""
    if q.dim() > 4:
        grads = flash_backward(*(x.flatten(0, -4) for x in (do, q, k, v, o)), logsumexp, is_causal)
        return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    if INTERPRETED and q.dtype == torch.bfloat16:
        grads = flash_backward(*(x.float() for x in (do, q, k, v, o)), logsumexp, is_causal)
        return tuple(grad.to(q.dtype) for grad in grads)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    lse2, delta = torch.empty((2, *logsumexp.shape), dtype=torch.float32, device=q.device)
    descriptors = _has_copy_engine(q.device)
    q, k, v, do = (loadable(x, descriptors) for x in (q, k, v, do))
    layouts = tuple((x.shape, x.stride()) for x in (q, k, v, do, o, dq, dk, dv))
    dq_plan, dkdv_plan = _backward_plans(layouts, q.dtype, q.device, is_causal, _precision(q.dtype))
    with on(q.device):
        dq_plan(q, k, v, do, o, logsumexp, lse2, delta, dq)
        dkdv_plan(q, k, v, do, lse2, delta, dk, dv)
    return dq, dk, dv


class _Problem:
    """The sizes and constants that all kernels of one attention share."""

    def __init__(
        self, q: Layout, k: Layout, dtype: torch.dtype, device: torch.device, is_causal: bool, precision: str
    ) -> None:
        (self.batch, self.heads, self.n_queries, self.d), _ = four_dims(*q)
        (_, _, self.n_keys, _), _ = four_dims(*k)
        self.itemsize, self.device, self.is_causal, self.precision = dtype.itemsize, device, is_causal, precision
        self.block_d = max(16, triton.next_power_of_2(self.d))
        self.scale = 1 / math.sqrt(self.d)
        self.sizes = (self.heads, self.n_queries, self.n_keys)

    def tile(self, kernel: str) -> Tile:
        return tile_for(kernel, self.itemsize, self.block_d, _capability(self.device))

    def programs(self, rows: int, block: int) -> int:
        return triton.cdiv(rows, block) * self.batch * self.heads

    def constants(self, tile: Tile, **only_some: bool) -> dict[str, Any]:
        return {"CAUSAL": self.is_causal} | only_some | {
            "D": self.d,
            "BLOCK_D": self.block_d,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "DESCRIPTORS": _has_copy_engine(self.device),
            "PRECISION": self.precision,
        }

    def sources(self, layouts: tuple[Layout, ...], rows: tuple[int, ...]) -> Callable[..., list]:
        """A function that makes of tensors what the kernels load from: descriptors, or the tensors themselves."""
        if not _has_copy_engine(self.device):
            return lambda *tensors: tensors
        describers = [describer(*layout, n, self.block_d) for layout, n in zip(layouts, rows, strict=True)]
        return lambda *tensors: [describe(x) for describe, x in zip(describers, tensors, strict=True)]


@lru_cache(maxsize=256)
def _forward_plan(layouts: tuple[Layout, ...], *settings: Any) -> Callable[..., None]:
    """The forward's launch for q, k, v, o of these layouts."""
    q, k, v, o = layouts
    problem = _Problem(q, k, *settings)
    tile = problem.tile("forward")
    launch = Launch(
        forward_kernel,
        problem.programs(problem.n_queries, tile.block_m),
        (*four_dims(*o)[1], *problem.sizes, problem.scale * LOG2E),
        problem.constants(tile, EVEN_KEYS=problem.n_keys % tile.block_n == 0),
        tile,
    )
    sources = problem.sources((q, k, v), (tile.block_m, tile.block_n, tile.block_n))
    return lambda q, k, v, *outputs: launch(*sources(q, k, v), *outputs)


@lru_cache(maxsize=256)
def _backward_plans(layouts: tuple[Layout, ...], *settings: Any) -> tuple[Callable[..., None], ...]:
    """The backward's two launches, for q, k, v, do, o, dq, dk, dv of these layouts."""
    *inputs, o, dq, dk, dv = layouts
    problem = _Problem(inputs[0], inputs[1], *settings)
    scales = (problem.scale, problem.scale * LOG2E)

    def plan(launch: Launch, tile: Tile) -> Callable[..., None]:
        sources = problem.sources(inputs, (tile.block_m, tile.block_n, tile.block_n, tile.block_m))
        return lambda q, k, v, do, *others: launch(*sources(q, k, v, do), *others)

    tile = problem.tile("dq")
    dq_launch = Launch(
        dq_kernel,
        problem.programs(problem.n_queries, tile.block_m),
        (*four_dims(*o)[1], *four_dims(*dq)[1], *problem.sizes, *scales),
        problem.constants(tile, EVEN_KEYS=problem.n_keys % tile.block_n == 0),
        tile,
    )
    dkdv_tile = problem.tile("dkdv")
    dkdv_launch = Launch(
        dkdv_kernel,
        problem.programs(problem.n_keys, dkdv_tile.block_n),
        (*four_dims(*dk)[1], *four_dims(*dv)[1], *problem.sizes, *scales),
        problem.constants(dkdv_tile),
        dkdv_tile,
    )
    return plan(dq_launch, tile), plan(dkdv_launch, dkdv_tile)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return (0, 0) if INTERPRETED else torch.cuda.get_device_capability(device)


def _has_copy_engine(device: torch.device) -> bool:
    return INTERPRETED or _capability(device) >= (9, 0)


def _precision(dtype: torch.dtype) -> str:
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return EXACT if exact else "tf32"


# torch.compile sees the two launches as opaque operators: no graph break, and nothing of Triton's to trace.
_forward_op = torch.library.custom_op("cs336_systems::flash_forward", mutates_args=())(flash_forward)
_backward_op = torch.library.custom_op("cs336_systems::flash_backward", mutates_args=())(flash_backward)


@_forward_op.register_fake
def _(q, k, v, is_causal):
    o = torch.empty_like(q) if q.dim() <= 4 else torch.empty_like(q.flatten(0, -4)).reshape(q.shape)
    return o, q.new_empty(q.shape[:-1], dtype=torch.float32)


@_backward_op.register_fake
def _(do, q, k, v, o, logsumexp, is_causal):
    return tuple(
        torch.empty_like(x) if x.dim() <= 4 else torch.empty_like(x.flatten(0, -4)).reshape(x.shape)
        for x in (q, k, v)
    )


class FlashAttentionTriton(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v in fused kernels: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and one logsumexp per query: memory linear in the sequence length.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = cast_for_autocast(q, k, v)
        check_inputs(q, k, v)
        run = _forward_op if torch.compiler.is_compiling() else flash_forward
        o, logsumexp = run(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, logsumexp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor):
        run = _backward_op if torch.compiler.is_compiling() else flash_backward
        return *run(do, *ctx.saved_tensors, ctx.is_causal), None
