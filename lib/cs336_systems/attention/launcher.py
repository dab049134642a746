"""From tensors to launched kernels: what depends on their layouts alone is settled once and kept.

A short sequence keeps the GPU busy for a few microseconds; choosing tiles, checking strides and finding the
compiled kernel again at every call would take longer than the kernel itself. So flash_triton keeps what
`forward_launcher` and `backward_launcher` make for the layouts that it meets, and each of these does only
what has to be done for each call. They belong to one GPU: that of their first call.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.config import (
    GLUON_KERNELS,
    HOPPER_BACKWARD_LENGTH,
    HOPPER_KERNELS,
    ONE_LAUNCH,
    OWN_KEYS,
    PARTS_ROWS,
    PARTS_TILE,
    PERSISTENT_HEADS,
    PLANES_KERNELS,
    PLANES_LENGTH,
    PRE_POST_TILE,
    PROGRAMS_PER_SM,
    SPLIT_TILE,
    WARP_GROUP_ROWS,
    KernelConfig,
    Tile,
    select_config,
)
from cs336_systems.attention.float32_planes import (
    planes_dkdv_kernel,
    planes_dq_kernel,
    planes_forward_kernel,
    split_kernel,
)
from cs336_systems.attention.kernel_launch import KernelLaunch, triton_version
from cs336_systems.attention.triton_backward import backward_kernel, dkdv_kernel, dq_kernel, sum_kernel
from cs336_systems.attention.triton_forward import forward_kernel, merge_kernel
from cs336_systems.kernels.runtime import ALIGNMENT, INTERPRETED, capability, sm_count

LOG2E = math.log2(math.e)
PLANES = 3  # of bfloat16 to a float32 matrix
PLANE_DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter multiplies its bit patterns
REGISTERS = 2**16  # of an SM
GLUON = 3, 6  # the Triton whose Gluon GLUON_KERNELS are written in; the others of Hopper's come with it
Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]  # shape, strides


def layout(x: Tensor) -> Layout:
    """All that a launcher needs to know of a tensor but its address."""
    return x.shape, x.stride()


def as_bhnd(layout: Layout) -> Layout:
    """That of an (..., n, d) tensor of two to four dimensions as (batch, heads, n, d)."""
    shape, strides = layout
    missing = 4 - len(shape)
    return (1,) * missing + tuple(shape), (0,) * missing + tuple(strides)


def tma_compatible(layout: Layout, itemsize: int) -> bool:
    """Whether TMA can load from such a tensor: a last stride of 1, the others in multiples of 16 bytes."""
    shape, strides = layout
    outer = [stride * itemsize for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    return (strides[-1] == 1 or shape[-1] == 1) and all(x and x % ALIGNMENT == 0 for x in outer)


def loadable(layout: Layout, itemsize: int, use_tma: bool) -> Layout:
    """The layout itself if the kernels can load from such a tensor, else that of a copy which they can.

    By TMA that is contiguous but for the rows, which begin at multiples of 16 bytes; by pointers, contiguous.
    """
    shape, strides = layout
    if use_tma:
        if tma_compatible(layout, itemsize):
            return layout
        return _padded(shape, itemsize)
    contiguous = _contiguous(shape)
    steps = zip(shape, strides, contiguous, strict=True)
    return layout if all(size == 1 or x == wanted for size, x, wanted in steps) else (shape, contiguous)


def _padded(shape: Shape, itemsize: int) -> Layout:
    unit = ALIGNMENT // itemsize
    return shape, _contiguous((*shape[:-1], triton.cdiv(shape[-1], unit) * unit))


def contiguous(layout: Layout) -> Layout:
    """That of a contiguous tensor of the same shape."""
    return layout[0], _contiguous(layout[0])


def _contiguous(shape: Shape) -> Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def describe(layout: Layout, block_shape: Shape, dtype: torch.dtype, gluon_layout: Any = None) -> Any:
    """The descriptor, still of no tensor, by which TMA loads tiles of block_shape from such a layout.

    gluon_layout: how Gluon's kernels want a tile in shared memory.
    """
    shape, strides = layout
    outer = [stride if size > 1 else ALIGNMENT for size, stride in zip(shape[:-1], strides, strict=False)]
    arguments = torch.empty(0, dtype=dtype, device="meta"), list(shape), [*outer, 1], list(block_shape)
    if gluon_layout is None:
        return TensorDescriptor(*arguments)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor(*arguments, layout=gluon_layout)


def tile_layout(block_shape: Shape, dtype: torch.dtype) -> Any:
    """How a tile lies in shared memory, for the matmuls of Gluon's kernels to read."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(block_shape, getattr(gl, str(dtype).removeprefix("torch.")))


def row_layout() -> Any:
    """How a row of float32 numbers, of L or delta, lies in shared memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class Split(NamedTuple):
    """Into how many parts a kernel's programs share a walk over keys or queries, and the rows of each."""

    parts: int = 1
    span: int = 0


NOT_SPLIT = Split()


class Problem:
    """The sizes of one attention, what its kernels are told of them, and inputs that they can load.

    inputs: layouts of q, k, v and perhaps do.
    """

    only_launch: KernelLaunch | None = None  # that takes the tensors as they come

    def __init__(self, inputs: Sequence[Layout], config: KernelConfig, is_causal: bool) -> None:
        self.config, self.is_causal = config, is_causal
        self.inputs = [loadable(x, config.dtype.itemsize, config.use_tma) for x in inputs]
        pairs = zip(inputs, self.inputs, strict=True)
        self.copies = [(i, new) for i, (given, new) in enumerate(pairs) if new is not given]
        (self.batch, self.heads, self.n_queries, self.d), _ = as_bhnd(inputs[0])
        self.n_keys = inputs[1][0][-2]

    def programs(self, kernel: str, tile: Tile) -> int:
        """One for each tile of what a program owns."""
        queries, keys = triton.cdiv(self.n_queries, tile.block_m), triton.cdiv(self.n_keys, tile.block_n)
        owned = queries + keys if kernel == "backward" else keys if kernel in OWN_KEYS else queries
        return owned * self.batch * self.heads

    def split(self, kernel: str) -> Split:
        """How this kernel's walk is split: see SplitLimits."""
        possible, walk = self.most_parts(kernel), self.walk(kernel)
        if possible == 1:
            return NOT_SPLIT
        limits, sms, tile = self.config.splits[kernel], self.config.sm_count, self.tile(kernel)
        programs = self.programs(kernel, tile)
        useful = min(limits.many * sms // programs, walk * sms // (limits.long * programs))
        parts = min(possible, limits.most, max(limits.few * sms // programs, useful))
        if parts < 2:
            return NOT_SPLIT
        unit = max(tile.block_m, tile.block_n)  # a tile lies in one part
        span = triton.cdiv(triton.cdiv(walk, parts), unit) * unit
        return Split(triton.cdiv(walk, span), span)

    def most_parts(self, kernel: str) -> int:
        """1 if the walk cannot be split."""
        limits = self.config.splits.get(kernel)
        parts = self.walk(kernel) // limits.shortest if limits else 1
        return parts if parts >= 4 else 1

    def walk(self, kernel: str) -> int:
        """How many rows a program can meet: keys, or in a backward pass whichever are more."""
        return self.n_keys if kernel.endswith("forward") else max(self.n_queries, self.n_keys)

    def fills_gpu(self, kernel: str, tile: Tile) -> bool:
        """Whether there are programs enough for all SMs."""
        programs = self.programs(kernel, tile) * self.most_parts(kernel)
        return programs >= PROGRAMS_PER_SM.get(kernel, 1) * self.config.sm_count

    def tile(self, kernel: str) -> Tile:
        """That of short walks, or the first that makes programs enough; the last where none does."""
        if self.has_short_walks(kernel):
            return self.config.short_walks[kernel].tile
        *larger, last = self.config.tiles[kernel]
        for tile in larger:
            unequal = self.is_causal and tile.max_registers  # programs that share an SM
            if self.fills_gpu(kernel, tile) and not unequal:
                return tile
        return last

    def has_short_walks(self, kernel: str) -> bool:
        """Whether this kernel's walks are short, and many."""
        short = self.config.short_walks.get(kernel)
        if short is None or self.n_keys > short.keys // (1 if self.is_causal else 4):
            return False
        enough = PROGRAMS_PER_SM[kernel] * self.programs_at_once(short.tile)
        return self.programs(kernel, short.tile) >= enough

    def programs_at_once(self, tile: Tile) -> int:
        """How many of Hopper's programs, of eight warps or more, the GPU has registers for."""
        each = 8 * 32 * tile.max_registers if tile.max_registers else REGISTERS
        return REGISTERS // each * self.config.sm_count

    def arguments(self, tile: Tile, split: Split = NOT_SPLIT, **layouts: Layout) -> dict[str, Any]:
        """All that any of the kernels takes and is no tensor; of the tensors in `layouts`, the strides."""
        scale, config = 1 / math.sqrt(self.d), self.config
        strides = {
            f"stride_{name}{dim}": stride
            for name, layout in layouts.items()
            for dim, stride in zip("bhnd", as_bhnd(layout)[1], strict=True)
        }
        return strides | {
            "n_heads": self.heads,
            "n_queries": self.n_queries,
            "n_keys": self.n_keys,
            "part_queries": self.batch * self.heads * self.n_queries,
            "part_keys": self.batch * self.heads * self.n_keys,
            "span": split.span,
            "SPLIT": split.parts > 1,
            "scale": scale,
            "scale_log2": scale * LOG2E,
            "CAUSAL": self.is_causal,
            "EVEN_KEYS": self.n_keys % tile.block_n == 0,
            "D": self.d,
            "BLOCK_D": config.block_d,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "USE_TMA": config.use_tma,
            "PRECISION": config.dot_precision,
            "CHUNK": tile.chunk,
            "STAGES": tile.num_stages,
            "ROWS": PARTS_ROWS,
        }

    def descriptors(self, kernel: str, tile: Tile) -> list[Any]:
        """Of the inputs; none where threads load the tiles. In Gluon a matmul's rows of what programs own."""
        if not self.config.use_tma:
            return []
        gluon, queries, keys = kernel in GLUON_KERNELS, tile.block_m, tile.block_n
        if gluon and kernel in OWN_KEYS:
            keys = min(keys, WARP_GROUP_ROWS)
        elif gluon:
            queries = min(queries, WARP_GROUP_ROWS)
        dtype, rows = self.config.dtype, (queries, keys, keys, queries)
        shapes = [(1, 1, n, self.config.block_d) for n in rows]
        return [
            describe(as_bhnd(x), shape, dtype, tile_layout(shape, dtype) if gluon else None)
            for x, shape in zip(self.inputs, shapes, strict=False)
        ]

    def kernel(self, name: str, function: Any, split: Split = NOT_SPLIT, **layouts: Layout) -> KernelLaunch:
        """One that loads tiles of the inputs and strides over the tensors in `layouts`."""
        tile = self.tile(name)
        return KernelLaunch(
            function,
            (self.programs(name, tile), split.parts),
            self.arguments(tile, split, **layouts),
            tile,
            self.descriptors(name, tile),
        )

    def prepare_parts(
        self, function: Any, split: Split, rows: Sequence[int], owned: Tile, **outputs: Layout
    ) -> dict[str, Layout]:
        """Prepare to add parts of outputs that have so many rows.

        Args:
            function: the kernel that adds them.
            owned: queries and keys of the programs that write them.

        Returns:
            The layouts in which those write: one part's, or the outputs' own if nothing is split.
        """
        self.parts, self.add = split.parts, None
        if split is NOT_SPLIT:
            return outputs
        programs = sum(triton.cdiv(n, PARTS_ROWS) for n in rows) * self.batch * self.heads
        self.add = KernelLaunch(function, (programs, 1), self.arguments(owned, split, **outputs), PARTS_TILE)
        return {name: contiguous(each) for name, each in outputs.items()}

    def parts_of(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the programs write: parts of the outputs, or these themselves."""
        if self.add is None:
            return outputs
        return [x.new_empty((self.parts, *x.shape), dtype=torch.float32) for x in outputs]

    def add_parts(self, parts: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if self.add is not None:
            self.add.run(*parts, *outputs)

    @property
    def runner(self) -> "Problem | KernelLaunch":
        """What `run` is called of: itself, or without a call in between its only launch."""
        return self if self.only_launch is None or self.copies else self.only_launch

    def with_copies(self, tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """The tensors, those that the kernels cannot load from replaced by copies."""
        if not self.copies:
            return tensors
        tensors = list(tensors)
        for i, (shape, strides) in self.copies:
            tensors[i] = tensors[i].new_empty_strided(shape, strides).copy_(tensors[i])
        return tensors


class Forward(Problem):
    """Run with q, k, v and what is written: O, L and, in "ieee", rest."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        *inputs, o = layouts
        super().__init__(inputs, config, is_causal)
        split = self.split("forward")
        written = self.prepare_parts(merge_kernel, split, [self.n_queries], self.tile("forward"), o=o)
        self.launch = self.kernel("forward", forward_kernel, split, **written)

    def run(self, *tensors: Tensor) -> None:
        q, k, v, o, lse, *rest = self.with_copies(tensors)
        outputs = o, lse, *(rest or [lse])  # any tensor where the kernel does not write it
        parts = self.parts_of(outputs)
        self.launch.run(q, k, v, *parts)
        self.add_parts(parts, outputs)


class HopperForward(Problem):
    """Run as `Forward`."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        from cs336_systems.attention.hopper_forward import hopper_forward_kernel

        *inputs, o = layouts
        super().__init__(inputs, config, is_causal)
        name = "hopper_forward"
        tile = self.tile(name)
        items, at_once = self.programs(name, tile), self.programs_at_once(tile)
        # Three consumers have no registers left for a mask by keys alone that lasts from item to item.
        spills = tile.block_m == 3 * WARP_GROUP_ROWS and not is_causal and self.n_keys % tile.block_n
        gains = config.block_d >= PERSISTENT_HEADS and not spills
        self.persistent = items > at_once and (gains or self.has_short_walks(name))
        self.launch = KernelLaunch(
            hopper_forward_kernel,
            (at_once if self.persistent else items, 1),
            self.arguments(tile, o=o) | {"items": items, "PERSISTENT": self.persistent},
            tile,
            self.descriptors(name, tile),
        )

    def run(self, *tensors: Tensor) -> None:
        q, k, v, o, lse = self.with_copies(tensors)
        # Any tensor where the kernel does not count.
        counter = torch.zeros(1, dtype=torch.int32, device=q.device) if self.persistent else lse
        self.launch.run(q, k, v, o, lse, counter)


class Backward(Problem):
    """Two kernels. Run with q, k, v, do, o, L, rest and what is written: dq, dk, dv."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        *inputs, o, dq, dk, dv = layouts
        super().__init__(inputs, config, is_causal)
        self.dq = self.kernel("dq", dq_kernel, o=o, dq=dq)
        self.dkdv = self.kernel("dkdv", dkdv_kernel, dk=dk, dv=dv)

    def run(self, *tensors: Tensor) -> None:
        q, k, v, do, o, lse, rest, dq, dk, dv = self.with_copies(tensors)
        delta = torch.empty_like(lse)
        self.dq.run(q, k, v, do, o, lse, rest, delta, dq)
        self.dkdv.run(q, k, v, do, lse, rest, delta, dk, dv)


class OneLaunchBackward(Problem):
    """Both kernels in one launch, for few programs. Run as `Backward`."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        *inputs, o, dq, dk, dv = layouts
        super().__init__(inputs, config, is_causal)
        split, rows = self.split("backward"), (self.n_queries, self.n_keys)
        written = self.prepare_parts(sum_kernel, split, rows, self.tile("backward"), dq=dq, dk=dk, dv=dv)
        self.launch = self.kernel("backward", backward_kernel, split, o=o, **written)
        self.only_launch = self.launch if self.add is None else None

    def run(self, *tensors: Tensor) -> None:
        *given, dq, dk, dv = self.with_copies(tensors)
        gradients = dq, dk, dv
        parts = self.parts_of(gradients)
        self.launch.run(*given, *parts)
        self.add_parts(parts, gradients)


class HopperBackward(Problem):
    """Hopper's kernel, and one before and one after it. Run as `Backward`."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        from cs336_systems.attention.dq_accum import bwd_postprocess_kernel, bwd_preprocess_kernel
        from cs336_systems.attention.hopper_backward import hopper_backward_kernel

        *inputs, o, dq, dk, dv = layouts
        super().__init__(inputs, config, is_causal)
        self.backward = self.kernel("hopper_backward", hopper_backward_kernel, dk=dk, dv=dv)
        tile = self.tile("hopper_backward")
        query_tiles = triton.cdiv(self.n_queries, tile.block_m)
        # lse2, delta and each of dq_accum's dimensions: (batch * heads, queries up to whole tiles)
        padded = self.batch * self.heads, query_tiles * tile.block_m
        self.workspace = 2 + config.block_d, *padded
        row = describe((padded, (padded[1], 1)), (1, tile.block_m), torch.float32, row_layout())
        self.backward.descriptors += [row, row]
        programs = padded[0] * query_tiles, 1
        around = programs, self.arguments(tile, do=self.inputs[3], o=o, dq=dq), PRE_POST_TILE
        self.preprocess = KernelLaunch(bwd_preprocess_kernel, *around)
        self.postprocess = KernelLaunch(bwd_postprocess_kernel, *around)

    def run(self, *tensors: Tensor) -> None:
        q, k, v, do, o, lse, _, dq, dk, dv = self.with_copies(tensors)
        workspace = torch.empty(self.workspace, dtype=torch.float32, device=q.device)
        lse2, delta, dq_accum = workspace[0], workspace[1], workspace[2:]
        self.preprocess.run(do, o, lse, lse2, delta, dq_accum)
        self.backward.run(q, k, v, do, lse2, delta, dq_accum, dk, dv)
        self.postprocess.run(dq_accum, dq)


class Planes(Problem):
    """One of float32 tensors, of which the kernels load planes of bfloat16 (see float32_planes)."""

    def __init__(self, inputs: Sequence[Layout], config: KernelConfig, is_causal: bool) -> None:
        planes = [planes_layout(x) for x in inputs]
        super().__init__(planes, replace(config, dtype=PLANE_DTYPE, use_tma=True), is_causal)
        self.heads //= PLANES
        q, k, v, do = (*inputs, inputs[0])[:4]  # forward has no do, and no programs for it
        arguments = self.arguments(SPLIT_TILE, q=q, k=k, v=v, do=do) | {"ROW": self.inputs[0][1][-2]}
        tiles = sum(triton.cdiv(n, SPLIT_TILE.block_m) for (*_, n, _), _ in self.inputs)
        self.split_inputs = KernelLaunch(
            split_kernel, (tiles * self.batch * self.heads, 1), arguments, SPLIT_TILE
        )

    def planes(self, *tensors: Tensor) -> list[Tensor]:
        """Those of the inputs, just written."""
        sizes = [self.batch * strides[0] for _, strides in self.inputs]
        made = [tensors[0].new_empty(size, dtype=PLANE_DTYPE) for size in sizes]
        unused = 4 - len(made)
        self.split_inputs.run(*tensors, *tensors[:unused], *made, *made[:unused])
        return made


def planes_layout(layout: Layout) -> Layout:
    """(batch, heads * PLANES, n, d), in rows that begin at multiples of 16 bytes."""
    (batch, heads, n, d), _ = as_bhnd(layout)
    return _padded((batch, heads * PLANES, n, d), PLANE_DTYPE.itemsize)


class PlanesForward(Planes):
    """Run as `Forward`."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        *inputs, o = layouts
        super().__init__(inputs, config, is_causal)
        split, tile = self.split("planes_forward"), self.tile("planes_forward")
        written = self.prepare_parts(merge_kernel, split, [self.n_queries], tile, o=o)
        self.launch = self.kernel("planes_forward", planes_forward_kernel, split, **written)

    def run(self, q: Tensor, k: Tensor, v: Tensor, *outputs: Tensor) -> None:
        parts = self.parts_of(outputs)
        self.launch.run(*self.planes(q, k, v), *parts)
        self.add_parts(parts, outputs)


class PlanesBackward(Planes):
    """Run as `Backward`, and as deterministic."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        *inputs, o, dq, dk, dv = layouts
        super().__init__(inputs, config, is_causal)
        split, rows = self.split("planes_dkdv"), (self.n_queries, self.n_keys)
        owned = replace(self.tile("planes_dkdv"), block_m=self.tile("planes_dq").block_m)
        written = self.prepare_parts(sum_kernel, split, rows, owned, dq=dq, dk=dk, dv=dv)
        self.dq = self.kernel("planes_dq", planes_dq_kernel, split, o=o, do=inputs[3], **written)
        self.dkdv = self.kernel("planes_dkdv", planes_dkdv_kernel, split, **written)

    def run(self, *tensors: Tensor) -> None:
        q, k, v, do, o, lse, rest, *gradients = tensors
        delta = torch.empty_like(lse)
        planes = self.planes(q, k, v, do)
        dq, dk, dv = parts = self.parts_of(gradients)
        self.dq.run(*planes, o, do, lse, rest, delta, dq)
        self.dkdv.run(*planes, lse, rest, delta, dk, dv)
        self.add_parts(parts, gradients)


@lru_cache(maxsize=256)
def config_for(
    dtype: torch.dtype, d_head: int, device: torch.device, allow_tf32: bool = False
) -> KernelConfig:
    """`select_config` for the GPU that this device is, or for the interpreter."""
    config = select_config(dtype, d_head, capability(device), sm_count(device), allow_tf32)
    if config.tiles.keys() & set(HOPPER_KERNELS) and triton_version() < GLUON:
        warnings.warn(
            f"Triton {triton.__version__} is older than 3.6, which Hopper's own kernels need: "
            "the slower ones for all GPUs run",
            stacklevel=2,
        )
        return config.with_tiles(**dict.fromkeys(HOPPER_KERNELS))
    return config


def forward_launcher(
    layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool
) -> Forward | HopperForward | PlanesForward:
    """For q, k, v, o of these layouts."""
    problem = Problem(layouts[:3], config, is_causal)
    if planes_run(problem):
        return PlanesForward(layouts, config, is_causal)
    if "hopper_forward" in config.tiles and problem.split("forward") is NOT_SPLIT:
        return HopperForward(layouts, config, is_causal)
    return Forward(layouts, config, is_causal)


def backward_launcher(
    layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool, deterministic: bool
) -> Backward | HopperBackward | OneLaunchBackward | PlanesBackward:
    """For q, k, v, do, o, dq, dk, dv of these layouts.

    Hopper's kernel adds dQ up in any order, and its programs are large: where they are fewer than the SMs,
    smaller programs keep more of them at work; where walks are short, these take longer to begin and to end.
    """
    problem = Problem(layouts[:4], config, is_causal)
    if planes_run(problem):
        return PlanesBackward(layouts, config, is_causal)
    if "hopper_backward" in config.tiles and not deterministic:
        long = problem.n_queries > HOPPER_BACKWARD_LENGTH * (2 if is_causal else 1)
        if long and problem.fills_gpu("hopper_backward", problem.tile("hopper_backward")):
            return HopperBackward(layouts, config, is_causal)
    if "backward" in config.tiles:
        tile = problem.tile("backward")
        few = problem.programs("backward", tile) <= ONE_LAUNCH[config.precision] * config.sm_count
        # Unsplit, two launches of small tiles take less time than one of tiles that make scores in chunks.
        if problem.split("backward") is not NOT_SPLIT or (few and not tile.chunk):
            return OneLaunchBackward(layouts, config, is_causal)
    return Backward(layouts, config, is_causal)


def planes_run(problem: Problem) -> bool:
    """Whether PLANES_KERNELS do, all or none: backward has to round scores as forward did.

    The forward has the fewest programs of them.
    """
    config = problem.config
    if not config.tiles.keys() >= set(PLANES_KERNELS):
        return False
    if min(problem.n_queries, problem.n_keys) < PLANES_LENGTH[config.block_d]:
        return False
    return problem.fills_gpu("planes_forward", problem.tile("planes_forward"))
