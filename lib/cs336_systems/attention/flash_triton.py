"""FlashAttention-2 with our own Triton kernels: launches, autograd.Function, and what torch.compile needs.

Two switches are PyTorch's own. float32 tensors multiply exactly by default, in TF32 after
torch.set_float32_matmul_precision("high") or torch.backends.cuda.matmul.fp32_precision = "tf32". And the
result has the same bits every time, but for dQ on Hopper, which is added up there in the order in which
programs come: so it is deterministic everywhere after torch.use_deterministic_algorithms(True), and slower.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from .inputs import accepted
from .kernels_backward import dkdv_kernel, dq_kernel
from .kernels_forward import forward_kernel
from .launch import ALIGNMENT, INTERPRETED, Launch, Shape, describer, four_dims, loadable, on
from .tuning import (
    HOPPERS_OWN,
    INTERPRETER,
    KERNELS,
    Tile,
    arithmetic,
    exact_precision,
    tile_by_hand,
    tiles_for,
    uses_descriptors,
)

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
    way = way_for(q.dtype, q.shape[-1], q.device, allows_tf32(q.dtype))
    q, k, v = (loadable(x, way.descriptors) for x in (q, k, v))
    plan = forward_plan(tuple((x.shape, x.stride()) for x in (q, k, v, o)), way, is_causal)
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
    way = way_for(q.dtype, q.shape[-1], q.device, allows_tf32(q.dtype))
    q, k, v, do = (loadable(x, way.descriptors) for x in (q, k, v, do))
    o, logsumexp = (x if x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in (o, logsumexp))
    layouts = tuple((x.shape, x.stride()) for x in (q, k, v, do, o, dq, dk, dv))
    plan = backward_plan(layouts, way, is_causal, torch.are_deterministic_algorithms_enabled())
    with on(q.device):
        plan(do, q, k, v, o, logsumexp, dq, dk, dv)
    return dq, dk, dv


@dataclass(frozen=True)
class Way:
    """How tensors of one dtype, head size and device are worked on; a launch is kept for each."""

    dtype: torch.dtype
    device: torch.device
    arithmetic: str
    precision: str
    block_d: int
    descriptors: bool
    tiles: tuple[tuple[Tile, ...], ...]  # of each of tuning.KERNELS, from large to small
    forward_by_hand: Tile | None  # of Hopper's own kernels, where there are any
    backward_by_hand: Tile | None
    processors: int

    def tiles_of(self, kernel: str) -> tuple[Tile, ...]:
        return self.tiles[KERNELS.index(kernel)]


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether PyTorch now multiplies matrices of this dtype in TF32 on a GPU.

    Of its switches the newest is read: it follows the older ones, which refuse to answer once it was used.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


@lru_cache(maxsize=256)
def way_for(dtype: torch.dtype, d: int, device: torch.device, tf32: bool = False) -> Way:
    capability = INTERPRETER if INTERPRETED else torch.cuda.get_device_capability(device)
    exact = dtype == torch.float32 and not tf32
    precision = exact_precision(capability) if exact else "tf32"
    kind, block_d = arithmetic(dtype.itemsize, precision), max(16, triton.next_power_of_2(d))
    tiles = tuple(tiles_for(kernel, kind, block_d, capability) for kernel in KERNELS)
    descriptors = uses_descriptors(capability, kind, block_d)
    by_hand = (tile_by_hand(kernel, kind, block_d, capability) for kernel in HOPPERS_OWN)
    processors = 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
    return Way(dtype, device, kind, precision, block_d, descriptors, tiles, *by_hand, processors)


class Problem:
    """The sizes and constants that all kernels of one attention share."""

    def __init__(self, q: Layout, k: Layout, way: Way, is_causal: bool) -> None:
        (self.batch, self.heads, self.n_queries, self.d), _ = four_dims(*q)
        (_, _, self.n_keys, _), _ = four_dims(*k)
        self.way, self.is_causal = way, is_causal
        self.scale = 1 / math.sqrt(self.d)
        self.scale_log2 = self.scale * LOG2E
        self.sizes = (self.heads, self.n_queries, self.n_keys)

    def programs(self, rows: int, block: int) -> int:
        return triton.cdiv(rows, block) * self.batch * self.heads

    def occupies_all(self, rows: int, block: int) -> bool:
        """Whether there is a program for each processor at least."""
        return self.programs(rows, block) >= self.way.processors

    def tile(self, kernel: str) -> Tile:
        """The largest of the kernel's tiles that occupies all processors; the smallest where none does."""
        owns_keys = kernel == "dkdv"
        rows = self.n_keys if owns_keys else self.n_queries
        tiles = self.way.tiles_of(kernel)
        enough = (x for x in tiles if self.occupies_all(rows, x.block_n if owns_keys else x.block_m))
        return next(enough, tiles[-1])

    def constants(self, tile: Tile, **only_some: bool) -> dict[str, Any]:
        """The constexprs, in the kernels' order."""
        return {"CAUSAL": self.is_causal, **only_some} | {
            "D": self.d,
            "BLOCK_D": self.way.block_d,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "DESCRIPTORS": self.way.descriptors,
            "PRECISION": self.way.precision,
            "RELOAD": tile.reload,
        }

    def sources(self, layouts: tuple[Layout, ...], rows: tuple[int, ...]) -> Callable[..., Iterable]:
        """A function that turns tensors into what the kernels load from: descriptors, or just themselves."""
        if not self.way.descriptors:
            return lambda *tensors: tensors
        describers = [
            describer(*four_dims(*layout), (1, 1, n, self.way.block_d))
            for layout, n in zip(layouts, rows, strict=True)
        ]
        return lambda *tensors: [describe(x) for describe, x in zip(describers, tensors, strict=True)]


@lru_cache(maxsize=256)
def forward_plan(layouts: tuple[Layout, ...], way: Way, is_causal: bool) -> Callable[..., None]:
    """The forward's launch for q, k, v, o of these layouts."""
    q, k, v, o = layouts
    problem = Problem(q, k, way, is_causal)
    if way.forward_by_hand:
        from .hopper import hopper_forward_plan

        return hopper_forward_plan(problem, layouts)
    tile = problem.tile("forward")
    launch = Launch(
        forward_kernel,
        problem.programs(problem.n_queries, tile.block_m),
        (*four_dims(*o)[1], *problem.sizes, problem.scale_log2),
        problem.constants(tile, EVEN_KEYS=problem.n_keys % tile.block_n == 0),
        tile,
    )
    sources = problem.sources((q, k, v), (tile.block_m, tile.block_n, tile.block_n))
    return lambda q, k, v, *outputs: launch(*sources(q, k, v), *outputs)


@lru_cache(maxsize=256)
def backward_plan(
    layouts: tuple[Layout, ...], way: Way, is_causal: bool, deterministic: bool
) -> Callable[..., None]:
    """The backward for q, k, v, do, o, dq, dk, dv of these layouts.

    Call it with do, q, k, v, o, L, and what it writes: dq, dk, dv.
    """
    problem, tile = Problem(layouts[0], layouts[1], way, is_causal), way.backward_by_hand
    # Its programs are large; where they leave processors idle, the smaller ones of two kernels fill more.
    if tile and problem.occupies_all(problem.n_keys, tile.block_n) and not deterministic:
        from .hopper import hopper_backward_plan

        return hopper_backward_plan(problem, layouts)
    dq_plan, dkdv_plan = split_plans(layouts, way, is_causal)

    def run(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor, *outputs: Tensor):
        dq, *dkdv = outputs
        lse2, delta = torch.empty((2, *logsumexp.shape), dtype=torch.float32, device=q.device)
        dq_plan(q, k, v, do, o, logsumexp, lse2, delta, dq)
        dkdv_plan(q, k, v, do, lse2, delta, *dkdv)

    return run


def split_plans(
    layouts: tuple[Layout, ...], way: Way, is_causal: bool
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The launches of the two kernels, for q, k, v, do, o, dq, dk, dv of these layouts."""
    *inputs, o, dq, dk, dv = layouts
    problem = Problem(inputs[0], inputs[1], way, is_causal)

    def plan(kernel: Any, tile: Tile, programs: int, outputs: tuple[Layout, ...], **constants: bool):
        strides = [stride for output in outputs for stride in four_dims(*output)[1]]
        numbers = (*strides, *problem.sizes, problem.scale, problem.scale_log2)
        launch = Launch(kernel, programs, numbers, problem.constants(tile, **constants), tile)
        sources = problem.sources(inputs, (tile.block_m, tile.block_n, tile.block_n, tile.block_m))
        return lambda q, k, v, do, *others: launch(*sources(q, k, v, do), *others)

    tile = problem.tile("dq")
    even = problem.n_keys % tile.block_n == 0
    programs = problem.programs(problem.n_queries, tile.block_m)
    dq_plan = plan(dq_kernel, tile, programs, (o, dq), EVEN_KEYS=even)
    tile = problem.tile("dkdv")
    return dq_plan, plan(dkdv_kernel, tile, problem.programs(problem.n_keys, tile.block_n), (dk, dv))


# To torch.compile forward and backward are opaque operators: no graph break, nothing of Triton's to trace.
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
        q, k, v = accepted(q, k, v)
        if not (q.is_cuda or INTERPRETED):
            raise ValueError(
                f"q, k, v are on {q.device}; allowed: a CUDA GPU, or any device in Triton's interpreter "
                "(TRITON_INTERPRET=1)"
            )
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
