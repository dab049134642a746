"""How the kernels are launched for tensors of given layouts: chosen once, and kept.

A *way* belongs to a dtype, head size and device; a *problem* has sizes, too; a *plan* takes tensors and
launches kernels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from cs336_systems.attention.config import (
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
from cs336_systems.attention.launcher import (
    INTERPRETED,
    Launch,
    Layout,
    describer,
    four_dims,
    layout_of_copy,
    readable,
    readable_copy,
)
from cs336_systems.attention.triton_backward import dkdv_kernel, dq_kernel
from cs336_systems.attention.triton_forward import forward_kernel

LOG2E = math.log2(math.e)


@dataclass(frozen=True, eq=False)  # each is its own key: all this would be hashed at every launch
class Way:
    """How tensors of one dtype, head size and device are worked on; a plan is kept for each."""

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

    def reads(self, layout: Layout) -> bool:
        """Whether the kernels can load from such a tensor where it is."""
        return readable(layout, self.dtype.itemsize, self.descriptors)

    def as_read(self, layout: Layout) -> Layout:
        """Of such a tensor, or of the copy that takes its place."""
        if self.reads(layout):
            return layout
        return layout_of_copy(layout[0], self.dtype.itemsize, self.descriptors)

    def tiles_of(self, kernel: str) -> tuple[Tile, ...]:
        return self.tiles[KERNELS.index(kernel)]


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
            "CHUNK": tile.chunk,
        }

    def loading(
        self, launch: Launch, layouts: Sequence[Layout], rows: tuple[int, ...]
    ) -> Callable[..., None]:
        """The launch, called with tensors: of the first ones, of these layouts, it gets what it loads from.

        That is descriptors of tiles of so many rows, or just the tensors.
        """
        if not self.way.descriptors:
            return launch
        describers = [
            describer(*four_dims(*layout), (1, 1, n, self.way.block_d))
            for layout, n in zip(layouts, rows, strict=True)
        ]

        def run(*tensors: Tensor) -> None:
            described = [describe(x) for describe, x in zip(describers, tensors, strict=False)]
            launch(*described, *tensors[len(described) :])

        return run


def with_copies(plan: Callable[..., None], inputs: tuple[Layout, ...], way: Way) -> Callable[..., None]:
    """The plan, given copies of those of its inputs that the kernels cannot read where they are."""
    copied = [not way.reads(x) for x in inputs]
    if not any(copied):
        return plan

    def run(*tensors: Tensor) -> None:
        chosen = zip(tensors, copied, strict=False)
        read = [readable_copy(x, way.descriptors) if copy else x for x, copy in chosen]
        plan(*read, *tensors[len(read) :])

    return run


@lru_cache(maxsize=256)
def forward_plan(layouts: tuple[Layout, ...], way: Way, is_causal: bool) -> Callable[..., None]:
    """The forward's launch for q, k, v, o of these layouts; call it with q, k, v, o, L."""
    inputs, o = layouts[:3], layouts[3]
    read = tuple(way.as_read(x) for x in inputs)
    problem = Problem(read[0], read[1], way, is_causal)
    if way.forward_by_hand:
        from cs336_systems.attention.hopper_launch import hopper_forward_plan

        return with_copies(hopper_forward_plan(problem, (*read, o)), inputs, way)
    tile = problem.tile("forward")
    launch = Launch(
        forward_kernel,
        problem.programs(problem.n_queries, tile.block_m),
        (*four_dims(*o)[1], *problem.sizes, problem.scale_log2),
        problem.constants(tile, EVEN_KEYS=problem.n_keys % tile.block_n == 0),
        tile,
    )
    plan = problem.loading(launch, read, (tile.block_m, tile.block_n, tile.block_n))
    return with_copies(plan, inputs, way)


@lru_cache(maxsize=256)
def backward_plan(
    layouts: tuple[Layout, ...], way: Way, is_causal: bool, deterministic: bool
) -> Callable[..., None]:
    """The backward for q, k, v, do, o, dq, dk, dv of these layouts.

    Call it with q, k, v, do, o, L, and what it writes: dq, dk, dv.
    """
    inputs, others = layouts[:4], layouts[4:]
    layouts = *(way.as_read(x) for x in inputs), *others
    problem, tile = Problem(layouts[0], layouts[1], way, is_causal), way.backward_by_hand
    # Its programs are large; where they leave processors idle, the smaller ones of two kernels fill more.
    if tile and problem.occupies_all(problem.n_keys, tile.block_n) and not deterministic:
        from cs336_systems.attention.hopper_launch import hopper_backward_plan

        return with_copies(hopper_backward_plan(problem, layouts), inputs, way)
    dq_plan, dkdv_plan = split_plans(layouts, way, is_causal)

    def plan(*tensors: Tensor) -> None:
        q, k, v, do, o, logsumexp, dq, dk, dv = tensors
        lse2, delta = torch.empty_like(logsumexp), torch.empty_like(logsumexp)
        dq_plan(q, k, v, do, o, logsumexp, lse2, delta, dq)
        dkdv_plan(q, k, v, do, lse2, delta, dk, dv)

    return with_copies(plan, inputs, way)


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
        return problem.loading(launch, inputs, (tile.block_m, tile.block_n, tile.block_n, tile.block_m))

    tile = problem.tile("dq")
    even = problem.n_keys % tile.block_n == 0
    programs = problem.programs(problem.n_queries, tile.block_m)
    dq_plan = plan(dq_kernel, tile, programs, (o, dq), EVEN_KEYS=even)
    tile = problem.tile("dkdv")
    return dq_plan, plan(dkdv_kernel, tile, problem.programs(problem.n_keys, tile.block_n), (dk, dv))
