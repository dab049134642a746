"""From a plan to launched kernels: what depends on the tensors' layouts alone is done once and kept.

A short sequence keeps the GPU busy for a few microseconds; choosing tiles, checking strides and finding the
compiled kernel again at every call would take longer than the kernel itself. So flash_triton keeps a Launcher
for the layouts that it meets. It belongs to one GPU: that of its first call.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.bf16x3 import split_kernel
from cs336_systems.attention.choose import Problem, cdiv, choose
from cs336_systems.attention.dq_accum import bwd_postprocess_kernel, bwd_preprocess_kernel
from cs336_systems.attention.hopper_backward import DQ_COLUMNS, ROW, hopper_backward_kernel
from cs336_systems.attention.hopper_forward import hopper_forward_kernel
from cs336_systems.attention.kernel_launch import KernelLaunch
from cs336_systems.attention.tiles import (
    BF16X3_KERNELS,
    BF16X3_TILE,
    GLUON_KERNELS,
    MERGE_TILE,
    OWN_KEYS,
    PRE_POST_TILE,
    WARP_GROUP_ROWS,
    Tile,
    Tuning,
    select_tuning,
)
from cs336_systems.attention.triton_backward import (
    backward_kernel,
    dkdv_kernel,
    dq_kernel,
    sum_kernel,
)
from cs336_systems.attention.triton_forward import forward_kernel, merge_kernel
from cs336_systems.kernels.runtime import ALIGNMENT, capability, sm_count

LOG2E = math.log2(math.e)
FORWARD, BACKWARD = ("q", "k", "v", "o"), ("q", "k", "v", "do", "o", "dq", "dk", "dv")
BF16X3 = "bf16x3_"  # of the names of kernels whose operands are in three parts
FUNCTIONS = {
    "forward": forward_kernel,
    "hopper_forward": hopper_forward_kernel,
    "dq": dq_kernel,
    "dkdv": dkdv_kernel,
    "backward": backward_kernel,
    "hopper_backward": hopper_backward_kernel,
}
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


def contiguous(shape: Shape, unit: int = 1) -> Layout:
    """That of a tensor that is contiguous, but for rows that begin at multiples of so many numbers."""
    sizes = (*shape[:-1], cdiv(shape[-1], unit) * unit)
    return shape, tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def tma_compatible(layout: Layout, itemsize: int) -> bool:
    """Whether TMA can load from such a tensor: a last stride of 1, the others in multiples of 16 bytes."""
    shape, strides = layout
    outer = [
        stride * itemsize for size, stride in zip(shape[:-1], strides, strict=False) if size > 1
    ]
    return (strides[-1] == 1 or shape[-1] == 1) and all(x and x % ALIGNMENT == 0 for x in outer)


def kernel_layout(layout: Layout, itemsize: int, use_tma: bool) -> Layout:
    """The layout itself if the kernels can load from such a tensor, else that of a copy.

    For TMA its rows are padded to 16 bytes; for pointers it is contiguous.
    """
    shape, strides = layout
    if use_tma:
        return (
            layout if tma_compatible(layout, itemsize) else contiguous(shape, ALIGNMENT // itemsize)
        )
    steps = zip(shape, strides, contiguous(shape)[1], strict=True)
    return (
        layout if all(size == 1 or x == wanted for size, x, wanted in steps) else contiguous(shape)
    )


def describe(layout: Layout, block_shape: Shape, dtype: torch.dtype, gluon: Any = None) -> Any:
    """The descriptor, still of no tensor, by which TMA loads tiles of block_shape from such a layout.

    gluon: for Gluon's kernels, how a tile lies in shared memory.
    """
    shape, strides = layout
    outer = [
        stride if size > 1 else ALIGNMENT for size, stride in zip(shape[:-1], strides, strict=False)
    ]
    arguments = (
        torch.empty(0, dtype=dtype, device="meta"),
        list(shape),
        [*outer, 1],
        list(block_shape),
    )
    return (
        TensorDescriptor(*arguments) if gluon is None else GluonDescriptor(*arguments, layout=gluon)
    )


class Launcher:
    """The kernels of one pass for tensors of one layout: `run` takes the inputs, then what is written.

    Forward: q, k, v; O, L and, in "ieee", L's residual. Backward: q, k, v, do, o, L, residual; dq, dk, dv.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        tuning: Tuning,
        is_causal: bool,
        deterministic: bool = False,
        kernels: tuple[str, ...] = (),
    ) -> None:
        """layouts: of FORWARD or BACKWARD, two to four dimensions each. kernels: others than `choose`'s."""
        backward = len(layouts) == len(BACKWARD)
        self.layouts = dict(zip(BACKWARD if backward else FORWARD, layouts, strict=True))
        self.names = list(self.layouts)[: 4 if backward else 3]  # of the inputs
        (batch, heads, n_queries, self.d), _ = as_bhnd(layouts[0])
        n_keys = layouts[1][0][-2]
        self.problem = Problem(batch, heads, n_queries, n_keys, is_causal, backward, deterministic)
        self.tuning, self.plan = tuning, choose(self.problem, tuning, kernels)
        kernels = tuple(self.plan.tiles)
        self.bf16x3 = kernels[0] in BF16X3_KERNELS
        self.use_tma, self.dtype = tuning.use_tma or self.bf16x3, tuning.dtype
        given = [self.layouts[name] for name in self.names]
        if self.bf16x3:  # the kernels load three matrices of each
            shapes = [as_bhnd(each)[0] for each in given]
            self.dtype, self.copies = torch.bfloat16, []
            unit = ALIGNMENT // self.dtype.itemsize
            self.inputs = [contiguous((b, 3 * h, n, d), unit) for b, h, n, d in shapes]
            self.split_inputs = self._split_inputs(shapes)
        else:
            self.inputs = [kernel_layout(x, tuning.dtype.itemsize, self.use_tma) for x in given]
            pairs = enumerate(zip(given, self.inputs, strict=True))
            self.copies = [(i, new) for i, (old, new) in pairs if new is not old]
        by_tma = ("dk", "dv") if backward else ("o",)  # what Hopper's kernels store
        self.stored = [
            kernel_layout(self.layouts[x], tuning.dtype.itemsize, tuning.use_tma) for x in by_tma
        ]
        self.outputs = {
            name: self.layouts[name] for name in (("dq", "dk", "dv") if backward else ("o",))
        }
        self.merge = self._merge() if self.plan.splits > 1 else None
        self.launches = {kernel: self._launch(kernel) for kernel in kernels}
        self.run = getattr(self, f"_{kernels[-1].removeprefix(BF16X3)}", None)  # none of "dq" alone
        if kernels == ("hopper_backward",):
            self._prepare_hopper_backward()

    @property
    def runner(self) -> "Launcher | KernelLaunch":
        """What `run` is called of: the launcher or, without a call in between, its only launch."""
        alone = "backward" in self.launches and not self.copies and self.merge is None
        return self.launches["backward"] if alone else self

    def arguments(self, tile: Tile, **layouts: Layout) -> dict[str, Any]:
        """Every non-tensor argument of the kernels; of the tensors in `layouts`, the strides."""
        scale, tuning, problem, plan = 1 / math.sqrt(self.d), self.tuning, self.problem, self.plan
        return {f"{name}_strides": as_bhnd(each)[1] for name, each in layouts.items()} | {
            "n_heads": problem.heads,
            "n_queries": problem.n_queries,
            "n_keys": problem.n_keys,
            "all_queries": problem.batch * problem.heads * problem.n_queries,
            "all_keys": problem.batch * problem.heads * problem.n_keys,
            "split_size": plan.split_size,
            "SPLIT": plan.splits > 1,
            "scale": scale,
            "scale_log2": scale * LOG2E,
            "CAUSAL": problem.is_causal,
            "EVEN_QUERIES": problem.n_queries % tile.block_m == 0,
            "EVEN_KEYS": problem.n_keys % tile.block_n == 0,
            "D": self.d,
            "BLOCK_D": tuning.block_d,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "USE_TMA": self.use_tma,
            "PRECISION": "bf16x3" if self.bf16x3 else tuning.dot_precision,
            "CHUNK": tile.chunk,
            "STAGES": tile.num_stages,
            "ROWS": MERGE_TILE.block_m,
            "ROW": self.inputs[0][1][-2],
            "work_tiles": plan.work_tiles,
            "PERSISTENT": plan.persistent,
        }

    def _launch(self, kernel: str) -> KernelLaunch:
        """One that loads tiles of the inputs, and writes its outputs or one split's."""
        tile, grid = self.plan.tiles[kernel], (self.plan.programs[kernel], self.plan.splits)
        outputs = {"o": self.layouts["o"]} | self.outputs
        if self.merge is not None:
            outputs |= {name: contiguous(shape) for name, (shape, _) in self.outputs.items()}
        arguments = self.arguments(tile, **outputs)
        function = FUNCTIONS[kernel.removeprefix(BF16X3)]
        return KernelLaunch(function, grid, arguments, tile, self._descriptors(kernel, tile))

    def _descriptors(self, kernel: str, tile: Tile) -> list[Any]:
        """Of the inputs, and of O where TMA stores it; none where threads load the tiles.

        In Gluon of a matmul's rows of what programs own.
        """
        if not self.use_tma:
            return []
        gluon, queries, keys = kernel in GLUON_KERNELS, tile.block_m, tile.block_n
        if gluon and kernel in OWN_KEYS:
            keys = min(keys, WARP_GROUP_ROWS)
        elif gluon:
            queries = min(queries, WARP_GROUP_ROWS)
        shapes = [(1, 1, n, self.tuning.block_d) for n in (queries, keys, keys, queries)]
        stored = self.stored if kernel == "hopper_forward" else []
        element = getattr(gl, str(self.dtype).removeprefix("torch."))
        in_shared = gl.NVMMASharedLayout.get_default_for if gluon else lambda *_: None
        return [
            describe(as_bhnd(x), shape, self.dtype, in_shared(shape, element))
            for x, shape in zip([*self.inputs, *stored], shapes, strict=False)
        ]

    def _sources(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the kernels load: the inputs, copies of those that they cannot load from, or three of each."""
        if self.bf16x3:
            sizes = [shape[0] * strides[0] for shape, strides in self.inputs]
            made = [tensors[0].new_empty(size, dtype=self.dtype) for size in sizes]
            unused = 4 - len(made)  # forward has no do, and no programs for it
            self.split_inputs.run(*tensors, *tensors[:unused], *made, *made[:unused])
            return made
        if not self.copies:
            return tensors
        tensors = list(tensors)
        for i, (shape, strides) in self.copies:
            tensors[i] = tensors[i].new_empty_strided(shape, strides).copy_(tensors[i])
        return tensors

    def _split_inputs(self, shapes: Sequence[Shape]) -> KernelLaunch:
        given = {"do": self.layouts["q"]} | {name: self.layouts[name] for name in self.names}
        tiles = sum(cdiv(n, BF16X3_TILE.block_m) * b * h for b, h, n, _ in shapes)
        return KernelLaunch(
            split_kernel, (tiles, 1), self.arguments(BF16X3_TILE, **given), BF16X3_TILE
        )

    def _merge(self) -> KernelLaunch:
        """Of what the splits wrote, by the kernel for this pass."""
        problem, tiles = self.problem, self.plan.tiles.values()
        queries, keys = (cdiv(n, MERGE_TILE.block_m) for n in (problem.n_queries, problem.n_keys))
        programs = (queries + keys if problem.backward else queries) * problem.batch * problem.heads
        owned = Tile(
            next(iter(tiles)).block_m, [*tiles][-1].block_n, 0, 0
        )  # of the kernels that write them
        kernel = sum_kernel if problem.backward else merge_kernel
        return KernelLaunch(
            kernel, (programs, 1), self.arguments(owned, **self.outputs), MERGE_TILE
        )

    def _split_outputs(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the programs write: one of each for every split, or the outputs themselves."""
        if self.merge is None:
            return outputs
        return [x.new_empty((self.plan.splits, *x.shape), dtype=torch.float32) for x in outputs]

    def _run_storing(
        self, kernel: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *others
    ) -> None:
        """Run a kernel that stores the outputs by TMA: where it cannot, to tensors that are copied."""
        pairs = zip(outputs, self.stored, strict=True)
        stored = [x if layout(x) == to else x.new_empty_strided(*to) for x, to in pairs]
        self.launches[kernel].run(*inputs, *stored, *others)
        for x, made in zip(outputs, stored, strict=True):
            if made is not x:
                x.copy_(made)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *residual: Tensor
    ) -> None:
        outputs = o, lse, *(residual or [lse])  # any tensor where the kernel does not write it
        (launch,), written = self.launches.values(), self._split_outputs(outputs)
        launch.run(*self._sources((q, k, v)), *written)
        if self.merge is not None:
            self.merge.run(*written, *outputs)

    def _hopper_forward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
        # Any tensor where the kernel does not count.
        counter = (
            torch.zeros(1, dtype=torch.int32, device=q.device) if self.plan.persistent else lse
        )
        self._run_storing("hopper_forward", self._sources((q, k, v)), [o], lse, counter)

    def _dkdv(self, q, k, v, do, o, lse, residual, *gradients: Tensor) -> None:
        sources, delta = self._sources((q, k, v, do)), torch.empty_like(lse)
        dq, dk, dv = written = self._split_outputs(gradients)
        first, second = self.launches.values()
        first.run(*sources, o, lse, residual, delta, dq)
        second.run(*sources, lse, residual, delta, dk, dv)
        if self.merge is not None:
            self.merge.run(*written, *gradients)

    def _backward(self, q, k, v, do, o, lse, residual, *gradients: Tensor) -> None:
        written = self._split_outputs(gradients)
        self.launches["backward"].run(*self._sources((q, k, v, do)), o, lse, residual, *written)
        if self.merge is not None:
            self.merge.run(*written, *gradients)

    def _prepare_hopper_backward(self) -> None:
        """A kernel before it, and one after it (dq_accum)."""
        problem, tile = self.problem, self.plan.tiles["hopper_backward"]
        query_tiles, heads = cdiv(problem.n_queries, tile.block_m), problem.batch * problem.heads
        # lse2, delta and each of dq_accum's dimensions: (batch * heads, queries up to whole tiles)
        rows = heads, query_tiles * tile.block_m
        self.workspace = 2 + self.tuning.block_d, *rows
        size, row = self.tuning.block_d, ROW.value
        dq = [
            (math.prod(rows) * size // row, row),
            (tile.block_m * min(size, DQ_COLUMNS.value) // row, row),
        ]
        plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        of_rows, of_dq = (
            describe(contiguous(shape), block, torch.float32, plain)
            for shape, block in ((rows, (1, tile.block_m)), dq)
        )
        descriptors = self.launches["hopper_backward"].descriptors
        key = descriptors[1]
        stored = [
            describe(as_bhnd(x), key.block_shape, self.dtype, key.layout) for x in self.stored
        ]
        descriptors += [of_rows, of_rows, *stored, of_dq]
        around = {"do": self.inputs[3], "o": self.layouts["o"], "dq": self.layouts["dq"]}
        around = (heads * query_tiles, 1), self.arguments(tile, **around), PRE_POST_TILE
        self.launches["preprocess"] = KernelLaunch(bwd_preprocess_kernel, *around)
        self.launches["postprocess"] = KernelLaunch(bwd_postprocess_kernel, *around)

    def _hopper_backward(self, q, k, v, do, o, lse, _, dq, dk, dv) -> None:
        q, k, v, do = self._sources((q, k, v, do))
        workspace = torch.empty(self.workspace, dtype=torch.float32, device=q.device)
        lse2, delta, dq_accum = workspace[0], workspace[1], workspace[2:]
        self.launches["preprocess"].run(do, o, lse, lse2, delta, dq_accum)
        self._run_storing("hopper_backward", (q, k, v, do, lse2, delta), [dk, dv], dq_accum)
        self.launches["postprocess"].run(dq_accum, dq)


@lru_cache(maxsize=256)
def tuning_for(
    dtype: torch.dtype, d_head: int, device: torch.device, allow_tf32: bool = False
) -> Tuning:
    """`select_tuning` for the GPU that this device is, or for the interpreter."""
    return select_tuning(dtype, d_head, capability(device), sm_count(device), allow_tf32)
