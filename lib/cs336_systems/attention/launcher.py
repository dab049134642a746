"""From a plan to launched kernels: what depends on the tensors' layouts alone is done once and kept.

A short sequence keeps the GPU busy for a few microseconds; choosing tiles, checking strides and finding the
compiled kernel again at every call would take longer than the kernel itself. So flash_triton keeps a Launcher
for the layouts that it meets. It belongs to one GPU: that of its first call.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from cs336_systems.attention.bf16x3 import split_kernel
from cs336_systems.attention.choose import Problem, cdiv, choose
from cs336_systems.attention.dq_accum import bwd_postprocess_kernel, bwd_preprocess_kernel
from cs336_systems.attention.hopper_backward import DQ_COLUMNS, ROW, hopper_backward_kernel
from cs336_systems.attention.hopper_common import has_registers_for_backward
from cs336_systems.attention.hopper_forward import hopper_forward_kernel
from cs336_systems.attention.kernel_launch import KernelLaunch
from cs336_systems.attention.layouts import (
    Layout,
    Shape,
    as_bhnd,
    contiguous,
    describe,
    kernel_layout,
    layout,
)
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
from cs336_systems.attention.triton_common import Form
from cs336_systems.attention.triton_forward import forward_kernel, merge_kernel
from cs336_systems.kernels.runtime import ALIGNMENT, capability, sm_count

LOG2E = math.log2(math.e)
FORWARD = ("q", "k", "v", "o")
BACKWARD = ("q", "k", "v", "do", "o", "dq", "dk", "dv")
# BF16X3_KERNELS are here without their prefix: the same functions, compiled for operands in three parts.
FUNCTIONS = {
    "forward": forward_kernel,
    "hopper_forward": hopper_forward_kernel,
    "dq": dq_kernel,
    "dkdv": dkdv_kernel,
    "backward": backward_kernel,
    "hopper_backward": hopper_backward_kernel,
}


class Launcher:
    """The kernels of one pass for tensors of one layout. `run` takes what is read, then what is written:

    forward     q, k, v, then o, L and, in "ieee", L's residual
    backward    q, k, v, do, o, L, residual, then dq, dk, dv
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
        # In this order: each reads attributes above it, and the launches read all.
        backward = len(layouts) == len(BACKWARD)
        names = BACKWARD if backward else FORWARD
        self.layouts = dict(zip(names, layouts, strict=True))
        self.output_names = ("dq", "dk", "dv") if backward else ("o",)
        (batch, heads, n_queries, self.d), _ = as_bhnd(layouts[0])
        n_keys = layouts[1][0][-2]
        self.problem = Problem(batch, heads, n_queries, n_keys, is_causal, backward, deterministic)
        self.tuning = tuning
        self.plan = choose(self.problem, tuning, kernels)
        *_, self.last = self.plan.tiles
        self.bf16x3 = self.last in BF16X3_KERNELS
        self.use_tma = tuning.use_tma or self.bf16x3
        self.dtype = torch.bfloat16 if self.bf16x3 else tuning.dtype
        given = layouts[: 4 if backward else 3]
        self.inputs = [self._loaded(x) for x in given]
        pairs = enumerate(zip(given, self.inputs, strict=True))
        # `_loaded` returns what it was given, the same object, if the kernels can load from that. (Never with
        # bf16x3; then nobody reads `copies`.)
        self.copies = [(i, new) for i, (old, new) in pairs if new is not old]
        # Only Hopper's kernels read this: they store by TMA, all but dq, which they add up in a workspace.
        stored = [self.layouts[name] for name in self.output_names if name != "dq"]
        self.stored = [kernel_layout(x, tuning.dtype.itemsize, tuning.use_tma) for x in stored]
        self.launches = self._prepare_launches()
        self.merge = self.launches.get("merge")
        # A method by the name of the last kernel; nothing else finds these five:
        #     forward, bf16x3_forward    self._forward           backward           self._backward
        #     dkdv, bf16x3_dkdv          self._dkdv              hopper_backward    self._hopper_backward
        #     hopper_forward             self._hopper_forward    dq, bf16x3_dq      None
        # dq is the last kernel of no pass: alone it is only compiled.
        self.run = getattr(self, f"_{_function_name(self.last)}", None)

    @property
    def runner(self) -> "Launcher | KernelLaunch":
        """What a call runs: the launcher, or "backward" itself if `_backward` would do nothing else."""
        alone = self.last == "backward" and not self.copies and self.merge is None
        return self.launches["backward"] if alone else self

    def _loaded(self, x: Layout) -> Layout:
        """The layout that kernels load in place of an input's: itself, a copy's, or three parts' as heads."""
        if not self.bf16x3:
            return kernel_layout(x, self.dtype.itemsize, self.use_tma)
        batch, heads, n, d = as_bhnd(x)[0]
        return contiguous((batch, 3 * heads, n, d), ALIGNMENT // self.dtype.itemsize)

    def _prepare_launches(self) -> dict[str, KernelLaunch]:
        """By name, the plan's kernels and what runs before and after them:

        before          of the plan          after
        "split"         bf16x3_...           "merge", if plan.splits > 1
                        forward, backward    "merge", if plan.splits > 1
        "preprocess"    hopper_backward      "postprocess"
        """
        tiles = self.plan.tiles
        launches = {kernel: self._tile_launch(kernel, tile) for kernel, tile in tiles.items()}
        # "split" cuts numbers into three parts. plan.splits cuts loops, and "merge" is for these alone.
        if self.bf16x3:
            launches["split"] = self._split_launch()
        if self.plan.splits > 1:
            launches["merge"] = self._merge_launch()
        if self.last == "hopper_backward":
            tile = tiles["hopper_backward"]
            _, sequences, queries = self.workspace
            programs = sequences * queries // tile.block_m, 1
            # Of the same tiles of queries; PRE_POST_TILE gives only the warps.
            around = programs, self.arguments(tile, do=self.inputs[3]), PRE_POST_TILE
            launches["preprocess"] = KernelLaunch(bwd_preprocess_kernel, *around)
            launches["postprocess"] = KernelLaunch(bwd_postprocess_kernel, *around)
        return launches

    def _tile_launch(self, kernel: str, tile: Tile) -> KernelLaunch:
        """A kernel of the plan. With splits it writes those of `_split_outputs`, which are contiguous."""
        splits = {}
        if self.plan.splits > 1:
            splits = {name: contiguous(self.layouts[name][0]) for name in self.output_names}
        programs = self.plan.programs[kernel], self.plan.splits
        arguments = self.arguments(tile, **splits)
        descriptors = self._descriptors(kernel, tile) if self.use_tma else []
        function = FUNCTIONS[_function_name(kernel)]
        return KernelLaunch(function, programs, arguments, tile, descriptors)

    def _split_launch(self) -> KernelLaunch:
        """The kernel that writes three bfloat16 parts of each input."""
        rows = BF16X3_TILE.block_m
        tiles = [b * heads // 3 * cdiv(n, rows) for (b, heads, n, _), _ in self.inputs]
        # The forward has no do, and no programs for it.
        arguments = self.arguments(BF16X3_TILE, do=self.layouts.get("do", self.layouts["q"]))
        return KernelLaunch(split_kernel, (sum(tiles), 1), arguments, BF16X3_TILE)

    def _merge_launch(self) -> KernelLaunch:
        """The kernel that makes this pass's outputs of what the splits wrote."""
        problem = self.problem
        tiles = cdiv(problem.n_queries, MERGE_TILE.block_m)
        if problem.backward:
            tiles += cdiv(problem.n_keys, MERGE_TILE.block_m)
        # Of the kernels that write splits the first owns queries, the last keys.
        writers = list(self.plan.tiles.values())
        owned = Tile(writers[0].block_m, writers[-1].block_n, 0, 0)
        kernel = sum_kernel if problem.backward else merge_kernel
        programs = tiles * problem.batch * problem.heads, 1
        # BLOCK_M and BLOCK_N are those of the writers; MERGE_TILE's rows are its argument ROWS.
        return KernelLaunch(kernel, programs, self.arguments(owned), MERGE_TILE)

    def arguments(self, tile: Tile, **layouts: Layout) -> dict[str, Any]:
        """By parameter name, whatever any kernel takes besides tensors.

        layouts: of tensors that this kernel gets with other strides than `self.layouts` says.
        """
        layouts = self.layouts | layouts
        strides = {f"{name}_strides": as_bhnd(each)[1] for name, each in layouts.items()}
        last_queries = self.problem.n_queries % tile.block_m
        last_keys = self.problem.n_keys % tile.block_n
        of_tile = {
            "EVEN_QUERIES": last_queries == 0,
            "EVEN_KEYS": last_keys == 0,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "CHUNK": tile.chunk,
            "STAGES": tile.num_stages,
        }
        arguments = self._of_all_tiles | strides | of_tile
        form = Form(*(arguments[name] for name in Form._fields))
        return arguments | {"form": form}

    @cached_property
    def _of_all_tiles(self) -> dict[str, Any]:
        """Arguments that are the same for every kernel, whatever its tile."""
        problem = self.problem
        sequences = problem.batch * problem.heads
        _, strides = self.inputs[0]
        scale = 1 / math.sqrt(self.d)
        precision = "bf16x3" if self.bf16x3 else self.tuning.dot_precision
        # ROW: how far apart the rows lie that `split_kernel` writes (not hopper_backward's ROW). ROWS: of a
        # tile of `merge_kernel` and of `sum_kernel`.
        same = {
            "n_heads": problem.heads,
            "all_queries": sequences * problem.n_queries,
            "all_keys": sequences * problem.n_keys,
            "D": self.d,
            "BLOCK_D": self.tuning.block_d,
            "ROW": strides[-2],
            "ROWS": MERGE_TILE.block_m,
        }
        same |= {
            "scale": scale,
            "scale_log2": scale * LOG2E,
            "PRECISION": precision,
            # "tf32" stands for all that rounds in the matmul: 16 bits come with it, too.
            "EXACT": precision != "tf32",
            "CAUSAL": problem.is_causal,
            "USE_TMA": self.use_tma,
            "SPLIT": self.plan.splits > 1,
            "PERSISTENT": self.plan.persistent,
        }
        return problem._asdict() | vars(self.plan) | same

    def _descriptors(self, kernel: str, tile: Tile) -> list[Any]:
        """In the order of the kernel's parameters; after the inputs q, k, v (do) come

        hopper_forward     o
        hopper_backward    lse2, delta, dk, dv, dq_accum
        """
        gluon = kernel in GLUON_KERNELS
        queries = tile.block_m
        keys = tile.block_n
        # Gluon's programs load and store what they own by the tiles of one matmul, of four of their warps.
        if gluon and kernel in OWN_KEYS:
            keys = min(keys, WARP_GROUP_ROWS)
        elif gluon:
            queries = min(queries, WARP_GROUP_ROWS)
        of_queries = (1, 1, queries, self.tuning.block_d)
        of_keys = (1, 1, keys, self.tuning.block_d)
        blocks = zip(self.inputs, (of_queries, of_keys, of_keys, of_queries), strict=False)
        descriptors = [self._descriptor(x, block, gluon) for x, block in blocks]
        if kernel == "hopper_forward":
            descriptors += [self._descriptor(x, of_queries, gluon) for x in self.stored]
        if kernel == "hopper_backward":
            sums, dq = self._float32_descriptors(tile)
            stored = [self._descriptor(x, of_keys, gluon) for x in self.stored]
            descriptors += [sums, sums] + stored + [dq]
        return descriptors

    def _descriptor(self, x: Layout, block: Shape, gluon: bool) -> Any:
        in_shared = None
        if gluon:
            element = getattr(gl, str(self.dtype).removeprefix("torch."))
            in_shared = gl.NVMMASharedLayout.get_default_for(block, element)
        return describe(as_bhnd(x), block, self.dtype, in_shared)

    def _float32_descriptors(self, tile: Tile) -> tuple[Any, Any]:
        """One for lse2 and for delta, a number a query; one for dq_accum, all of it as rows of ROW numbers.

        A block of dq_accum is what the dQ warps add at once, a tile of queries by up to DQ_COLUMNS columns:
        for 64 queries of heads of 128, 64 * 64 numbers, 16 rows.
        """
        plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        _, sequences, queries = self.workspace
        d, row = self.tuning.block_d, ROW.value
        sums = contiguous((sequences, queries))
        dq = contiguous((sequences * queries * d // row, row))
        dq_block = (tile.block_m * min(d, DQ_COLUMNS.value) // row, row)
        return (
            describe(sums, (1, tile.block_m), torch.float32, plain),
            describe(dq, dq_block, torch.float32, plain),
        )

    @cached_property
    def workspace(self) -> Shape:
        """Shape of what "hopper_backward" needs in float32: [0] is lse2, [1] delta, [2:] dq_accum's memory.

        (2 + block_d, batch * heads, queries up to whole tiles).
        """
        problem = self.problem
        rows = self.plan.tiles["hopper_backward"].block_m
        queries = cdiv(problem.n_queries, rows) * rows
        return 2 + self.tuning.block_d, problem.batch * problem.heads, queries

    def _sources(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the kernels load: the inputs, copies of those that they cannot load from, or parts of each."""
        if self.bf16x3:
            # With the padding of rows: as many numbers as a batch takes, times the batches.
            sizes = [shape[0] * strides[0] for shape, strides in self.inputs]
            parts = [tensors[0].new_empty(size, dtype=self.dtype) for size in sizes]
            # The forward has no do, and no programs for it: any tensor stands there.
            missing = 4 - len(parts)
            self.launches["split"].run(*tensors, *tensors[:missing], *parts, *parts[:missing])
            return parts
        if not self.copies:
            return tensors
        tensors = list(tensors)
        for i, (shape, strides) in self.copies:
            tensors[i] = tensors[i].new_empty_strided(shape, strides).copy_(tensors[i])
        return tensors

    def _split_outputs(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the programs write: the outputs, or with splits (splits, *shape) in float32 for each."""
        if self.merge is None:
            return outputs
        return [x.new_empty(self.plan.splits, *x.shape, dtype=torch.float32) for x in outputs]

    def _run_storing(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *others) -> None:
        """Run the last kernel, which stores the outputs by TMA."""
        # What TMA cannot store to, as rows have to be multiples of 16 bytes, gets a copy.
        pairs = zip(outputs, self.stored, strict=True)
        stored = [x if layout(x) == to else x.new_empty_strided(*to) for x, to in pairs]
        self.launches[self.last].run(*inputs, *stored, *others)
        for x, written in zip(outputs, stored, strict=True):
            if written is not x:
                x.copy_(written)

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        residual: Tensor | None = None,
    ) -> None:
        # Any tensor where the kernel writes no residual.
        outputs = o, lse, lse if residual is None else residual
        written = self._split_outputs(outputs)
        self.launches[self.last].run(*self._sources((q, k, v)), *written)
        if self.merge is not None:
            self.merge.run(*written, *outputs)

    def _hopper_forward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
        # Any tensor where the kernel does not count.
        counter = lse
        if self.plan.persistent:
            counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        self._run_storing(self._sources((q, k, v)), [o], lse, counter)

    def _dkdv(self, q, k, v, do, o, lse, residual, *gradients: Tensor) -> None:
        sources = self._sources((q, k, v, do))
        delta = torch.empty_like(lse)
        written = self._split_outputs(gradients)
        dq, dk, dv = written
        first, second = (self.launches[kernel] for kernel in self.plan.tiles)
        # The first makes delta, which the second reads.
        first.run(*sources, o, lse, residual, delta, dq)
        second.run(*sources, lse, residual, delta, dk, dv)
        if self.merge is not None:
            self.merge.run(*written, *gradients)

    def _backward(self, q, k, v, do, o, lse, residual, *gradients: Tensor) -> None:
        # Programs that own queries and such that own keys, in one launch: each makes the delta that it needs.
        written = self._split_outputs(gradients)
        self.launches["backward"].run(*self._sources((q, k, v, do)), o, lse, residual, *written)
        if self.merge is not None:
            self.merge.run(*written, *gradients)

    def _hopper_backward(self, q, k, v, do, o, lse, _, dq, dk, dv) -> None:
        q, k, v, do = self._sources((q, k, v, do))
        workspace = torch.empty(self.workspace, dtype=torch.float32, device=q.device)
        lse2 = workspace[0]
        delta = workspace[1]
        dq_accum = workspace[2:]
        self.launches["preprocess"].run(do, o, lse, lse2, delta, dq_accum)
        self._run_storing((q, k, v, do, lse2, delta), [dk, dv], dq_accum)
        self.launches["postprocess"].run(dq_accum, dq)


def _function_name(kernel: str) -> str:
    return kernel.removeprefix("bf16x3_")


@lru_cache(maxsize=256)
def tuning_for(
    dtype: torch.dtype, d_head: int, device: torch.device, allow_tf32: bool = False
) -> Tuning:
    """`select_tuning` for this GPU, or for the interpreter; without hopper_backward if it would spill."""
    tuning = select_tuning(dtype, d_head, capability(device), sm_count(device), allow_tf32)
    if "hopper_backward" in tuning.tiles and not has_registers_for_backward():
        tuning = tuning.with_tiles(hopper_backward=None)
    return tuning
