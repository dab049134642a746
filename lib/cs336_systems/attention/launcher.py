"""From tensors to launched kernels: what depends on their layouts alone is settled once and kept.

A short sequence keeps the GPU busy for a few microseconds; choosing tiles, checking strides and finding the
compiled kernel again at every call would take longer than the kernel itself. So flash_triton keeps a
`Forward`, and a `Backward` or `HopperBackward`, for the layouts that it meets, and each of these does only
what has to be done for each call. They belong to one GPU: that of their first call.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.config import (
    HOPPER_KERNELS,
    PRE_POST_TILE,
    PROGRAMS_PER_SM,
    WARP_GROUP_ROWS,
    KernelConfig,
    Tile,
    select_config,
)
from cs336_systems.attention.triton_backward import dkdv_kernel, dq_kernel
from cs336_systems.attention.triton_forward import forward_kernel
from cs336_systems.kernels.runtime import ALIGNMENT, capability, sm_count

LOG2E = math.log2(math.e)
STREAM = 3  # where among a compiled kernel's arguments it is: after the grid
MAX_MAPS = 1024
GLUON = 3, 6  # the Triton whose Gluon HOPPER_KERNELS are written in
KNOWN_INSIDE = (3, 6), (3, 7)  # the Tritons beneath whose launcher KernelLaunch can reach
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
        unit = ALIGNMENT // itemsize
        return shape, _contiguous((*shape[:-1], triton.cdiv(shape[-1], unit) * unit))
    contiguous = _contiguous(shape)
    steps = zip(shape, strides, contiguous, strict=True)
    return layout if all(size == 1 or x == wanted for size, x, wanted in steps) else (shape, contiguous)


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


class KernelLaunch:
    """A kernel with its grid and every argument but the tensors: call it with those.

    Args:
        arguments: by name; of more than the kernel takes, those that it takes.
        descriptors: for the first tensors, which the kernel loads by TMA.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        arguments: dict[str, int | float | bool | str],
        tile: Tile,
        descriptors: Sequence[Any] = (),
    ) -> None:
        self.kernel, self.grid, self.descriptors = kernel, (programs, 1, 1), descriptors
        names = kernel.arg_names
        tensors = sum(name.endswith(("_src", "_ptr")) for name in names)  # they come first
        self.arguments = tuple(arguments[name] for name in names[tensors:])
        self.options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.max_registers:
            self.options["maxnreg"] = tile.max_registers
        self.launch = None

    def __call__(self, *tensors: Tensor) -> None:
        if self.launch is None:
            compiled = self.kernel[self.grid](*self.described(tensors), *self.arguments, **self.options)
            # The interpreter compiles nothing; a Triton that is not known launches as it likes.
            if compiled is not None and triton_version() in KNOWN_INSIDE:
                self._prepare(compiled, tensors)
            return
        arguments = self.launch_arguments.copy()
        arguments[STREAM] = self.current_stream(self.device)
        for i, maps, x in zip(self.map_places, self.maps, tensors, strict=False):
            arguments[i] = maps[x.data_ptr()]
        for i, x in zip(self.pointer_places, tensors[len(self.maps) :], strict=True):
            arguments[i] = x.data_ptr()
        self.launch(*arguments)

    def _prepare(self, compiled: Any, tensors: tuple[Tensor, ...]) -> None:
        """Do once what Triton does at every launch, so that addresses and the stream are all that is left.

        Triton would encode every descriptor again, and ask the driver about each tensor, but not about an
        address. Its launch hooks, by which its own profiler listens, are not called; memory for scratch,
        which it would allocate, our kernels do not use.
        """
        driver = triton.runtime.driver.active
        self.device, self.current_stream = driver.get_current_device(), driver.get_current_stream
        recorder, recorded = copy.copy(compiled.run), []
        launch, recorder.launch = recorder.launch, lambda *arguments: recorded.extend(arguments)
        if self.descriptors:
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]  # takes tensor maps
        self.maps, map_places, arguments = [], [], []
        for descriptor, meta in zip(self.descriptors, compiled.metadata.tensordesc_meta or (), strict=True):
            self.maps.append(TensorMaps(descriptor, meta))
            map_places.append(len(arguments))
            arguments += [None, *descriptor.shape, *descriptor.strides]
        pointers = range(len(arguments), len(arguments) + len(tensors) - len(self.maps))
        arguments += [*(None for _ in pointers), *self.arguments]
        hooks = None, None, None  # and what they are told
        recorder(*self.grid, None, compiled.function, compiled.packed_metadata, *hooks, *arguments)
        if isinstance(recorded[-1], tuple):  # Triton 3.7; 3.6 passes them one by one
            c_launch, first = launch, len(recorded) - 1
            recorded += recorded.pop()
            self.launch = lambda *arguments: c_launch(*arguments[:first], arguments[first:])
        else:
            self.launch, first = launch, len(recorded) - len(arguments)
        self.map_places = [first + i for i in map_places]
        self.pointer_places = [first + i for i in pointers]
        self.launch_arguments = recorded

    def compile(self, *tensors: Tensor) -> Any:
        """What Triton compiles for such tensors, on the meta device too, without a launch."""
        return self.kernel.warmup(*self.described(tensors), *self.arguments, grid=self.grid, **self.options)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The tensors, the first of them as the descriptors that the kernel loads by."""
        described = [_with_tensor(each, x) for each, x in zip(self.descriptors, tensors, strict=False)]
        return *described, *tensors[len(described) :]


class TensorMaps(dict):
    """What TMA reads of a descriptor, by the address of the tensor: addresses come again and again."""

    def __init__(self, descriptor: Any, meta: dict[str, Any]) -> None:
        super().__init__()
        self.descriptor, self.meta = descriptor, meta

    def __missing__(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) == MAX_MAPS:
            self.clear()
        base = SimpleNamespace(data_ptr=lambda: address)
        self[address], *_ = make_tensordesc_arg(_with_tensor(self.descriptor, base), self.meta)
        return self[address]


def _with_tensor(descriptor: Any, x: Any) -> Any:
    """A copy of the descriptor for this tensor, without the constructor's checks."""
    described = copy.copy(descriptor)
    described.base = x
    return described


class Problem:
    """The sizes of one attention, what its kernels are told of them, and inputs that they can load.

    inputs: layouts of q, k, v and perhaps do.
    """

    def __init__(self, inputs: Sequence[Layout], config: KernelConfig, is_causal: bool) -> None:
        self.config, self.is_causal = config, is_causal
        self.inputs = [loadable(x, config.dtype.itemsize, config.use_tma) for x in inputs]
        pairs = zip(inputs, self.inputs, strict=True)
        self.copies = [(i, new) for i, (given, new) in enumerate(pairs) if new is not given]
        (self.batch, self.heads, self.n_queries, self.d), _ = as_bhnd(inputs[0])
        self.n_keys = inputs[1][0][-2]

    def programs(self, kernel: str, tile: Tile) -> int:
        """One for each tile of what a program owns: keys in "dkdv" and "hopper_backward", else queries."""
        owns_keys = kernel in ("dkdv", "hopper_backward")
        rows, block = (self.n_keys, tile.block_n) if owns_keys else (self.n_queries, tile.block_m)
        return triton.cdiv(rows, block) * self.batch * self.heads

    def tile(self, kernel: str) -> Tile:
        """The first of the kernel's tiles that makes programs enough; the last where none does."""
        wanted = PROGRAMS_PER_SM.get(kernel, 1) * self.config.sm_count
        *larger, last = self.config.tiles[kernel]
        for tile in larger:
            unequal = self.is_causal and tile.max_registers  # programs that share an SM
            if self.programs(kernel, tile) >= wanted and not unequal:
                return tile
        return last

    def arguments(self, tile: Tile, **layouts: Layout) -> dict[str, Any]:
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
        }

    def descriptors(self, tile: Tile, gluon: bool) -> list[Any]:
        """Of the inputs; none where threads load the tiles."""
        if not self.config.use_tma:
            return []
        queries = min(tile.block_m, WARP_GROUP_ROWS) if gluon else tile.block_m
        dtype, rows = self.config.dtype, (queries, tile.block_n, tile.block_n, queries)
        shapes = [(1, 1, n, self.config.block_d) for n in rows]
        return [
            describe(as_bhnd(x), shape, dtype, tile_layout(shape, dtype) if gluon else None)
            for x, shape in zip(self.inputs, shapes, strict=False)
        ]

    def kernel(self, name: str, function: Any, **layouts: Layout) -> KernelLaunch:
        """One that loads tiles of the inputs and strides over the tensors in `layouts`."""
        tile = self.tile(name)
        descriptors = self.descriptors(tile, gluon=name in HOPPER_KERNELS)
        return KernelLaunch(
            function, self.programs(name, tile), self.arguments(tile, **layouts), tile, descriptors
        )

    def with_copies(self, tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """The tensors, those that the kernels cannot load from replaced by copies."""
        if not self.copies:
            return tensors
        tensors = list(tensors)
        for i, (shape, strides) in self.copies:
            tensors[i] = tensors[i].new_empty_strided(shape, strides).copy_(tensors[i])
        return tensors


class Forward(Problem):
    """Called with q, k, v, o and L."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        *inputs, o = layouts
        super().__init__(inputs, config, is_causal)
        self.name, function = "forward", forward_kernel
        if "hopper_forward" in config.tiles:
            from cs336_systems.attention.hopper_forward import hopper_forward_kernel

            self.name, function = "hopper_forward", hopper_forward_kernel
        self.launch = self.kernel(self.name, function, o=o)

    def __call__(self, *tensors: Tensor) -> None:
        self.launch(*self.with_copies(tensors))


class Backward(Problem):
    """Two kernels. Called with q, k, v, do, o, L and what is written: dq, dk, dv."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        *inputs, o, dq, dk, dv = layouts
        super().__init__(inputs, config, is_causal)
        self.dq = self.kernel("dq", dq_kernel, o=o, dq=dq)
        self.dkdv = self.kernel("dkdv", dkdv_kernel, dk=dk, dv=dv)

    def __call__(self, *tensors: Tensor) -> None:
        q, k, v, do, o, lse, dq, dk, dv = self.with_copies(tensors)
        lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
        self.dq(q, k, v, do, o, lse, lse2, delta, dq)
        self.dkdv(q, k, v, do, lse2, delta, dk, dv)


class HopperBackward(Problem):
    """Hopper's kernel, and one before and one after it. Called as `Backward`."""

    def __init__(self, layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool) -> None:
        from cs336_systems.attention.dq_accum import bwd_postprocess_kernel, bwd_preprocess_kernel
        from cs336_systems.attention.hopper_backward import hopper_backward_kernel
        from cs336_systems.attention.hopper_backward_narrow import hopper_backward_narrow_kernel

        *inputs, o, dq, dk, dv = layouts
        super().__init__(inputs, config, is_causal)
        function = hopper_backward_narrow_kernel if config.block_d <= 64 else hopper_backward_kernel
        self.backward = self.kernel("hopper_backward", function, dk=dk, dv=dv)
        tile = self.tile("hopper_backward")
        query_tiles = triton.cdiv(self.n_queries, tile.block_m)
        # lse2, delta and each of dq_accum's dimensions: (batch * heads, queries up to whole tiles)
        padded = self.batch * self.heads, query_tiles * tile.block_m
        self.workspace = 2 + config.block_d, *padded
        row = describe((padded, (padded[1], 1)), (1, tile.block_m), torch.float32, row_layout())
        self.backward.descriptors += [row, row]
        around = padded[0] * query_tiles, self.arguments(tile, do=self.inputs[3], o=o, dq=dq), PRE_POST_TILE
        self.preprocess = KernelLaunch(bwd_preprocess_kernel, *around)
        self.postprocess = KernelLaunch(bwd_postprocess_kernel, *around)

    def __call__(self, *tensors: Tensor) -> None:
        q, k, v, do, o, lse, dq, dk, dv = self.with_copies(tensors)
        workspace = torch.empty(self.workspace, dtype=torch.float32, device=q.device)
        lse2, delta, dq_accum = workspace[0], workspace[1], workspace[2:]
        self.preprocess(do, o, lse, lse2, delta, dq_accum)
        self.backward(q, k, v, do, lse2, delta, dq_accum, dk, dv)
        self.postprocess(dq_accum, dq)


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


def triton_version() -> tuple[int, ...]:
    return tuple(map(int, triton.__version__.split(".")[:2]))


def backward_launcher(
    layouts: tuple[Layout, ...], config: KernelConfig, is_causal: bool, deterministic: bool
) -> Backward | HopperBackward:
    """For q, k, v, do, o, dq, dk, dv of these layouts.

    Hopper's kernel adds dQ up in any order, and its programs are large: where they are fewer than the SMs,
    the smaller programs of the two kernels keep more of them at work.
    """
    if "hopper_backward" in config.tiles and not deterministic:
        problem = Problem(layouts[:4], config, is_causal)
        tile = problem.tile("hopper_backward")
        if problem.programs("hopper_backward", tile) >= config.sm_count:
            return HopperBackward(layouts, config, is_causal)
    return Backward(layouts, config, is_causal)
