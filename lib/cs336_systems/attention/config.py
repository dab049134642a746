"""How tensors of a dtype and head size are worked on by a GPU: the kernels, their tiles, TMA or pointers.

There is no autotuner: it would measure again in every process, and its choice would change from run to run.
Hardly a tile spills registers, as notebook 24 compiles them: Hopper's own kernels in every form, the others
causal. In their other forms a few of "ieee" spill up to 24 bytes, and up to 64 where their walk is split. Two
do, of heads of 128 in "ieee", and are the fastest all the same: planes_dkdv's, about 1 kB a thread (two
others, which spill half as much, took 1.36 times as long, and the same kernel in Gluon, without spills, 1.15
times), and backward's, 804 bytes (another, which spills 108, took 1.4 times as long). Hopper's were chosen by
measurements on an H200; dq and dkdv are within a fifth of the fastest there (notebook 26 has the study). The
portable ones, for all other GPUs, were only compiled: they fit the 99 KiB of shared memory that a block has
on the smallest.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

KERNELS = ("forward", "dq", "dkdv", "backward")  # in Triton, for every GPU
GLUON_KERNELS = ("hopper_forward", "hopper_backward")  # for Hopper alone, as are
PLANES_KERNELS = ("planes_forward", "planes_dq", "planes_dkdv")  # in Triton, for "ieee": see float32_planes
HOPPER_KERNELS = GLUON_KERNELS + PLANES_KERNELS
OWN_KEYS = ("dkdv", "hopper_backward", "planes_dkdv")  # whose programs own keys; those of others, queries
# How many programs each SM should get, if not one: the longest causal ones take as long as two on average.
PROGRAMS_PER_SM = {"hopper_forward": 1.75} | dict.fromkeys(PLANES_KERNELS, 0.45)
# "hopper_backward" runs where walks are longer than so many queries, causal ones than twice as many: up to
# 512 "dq" and "dkdv" take 0.82 to 1.0 of its time, up to 1,024 causal ones 0.94 to 1.0 (256 to 512 heads).
HOPPER_BACKWARD_LENGTH = 512
# PLANES_KERNELS run from so many queries and keys on, by head size, where each has its programs.
PLANES_LENGTH = {32: 2048, 64: 512, 128: 512}
# "backward" runs in place of "dq" and "dkdv" with up to so many programs an SM, or with a walk that is split.
ONE_LAUNCH = {"16bit": 2, "tf32": 2, "ieee": 1}
WARP_GROUP_ROWS = 64  # of what a program owns, to a matmul of four warps
# What is done with the numbers: bfloat16 and float16; float32 multiplied in TF32; float32 with all its bits.
PRECISIONS = ("16bit", "tf32", "ieee")
Capability = tuple[int, int]
INTERPRETER: Capability = (0, 0)  # in place of a compute capability


@dataclass(frozen=True)
class Tile:
    """block_m queries by block_n keys; at most max_registers a thread (None: the compiler decides).

    With a chunk, scores are made of so many dimensions at a time (see triton_forward).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    chunk: int = 0

    def row(self) -> dict[str, int | None]:
        """The columns that tell a tile in the tables of rows."""
        return vars(self) | {"chunk": self.chunk or None}


# (kernel, precision): {largest head size: its tiles}. Of several, the first that makes a program for every SM
# (or PROGRAMS_PER_SM) runs, else the last: in "ieee" matmuls are so slow that an SM at work counts for more
# than a large tile. Measured on an H200, one head of 1,024 and 4,096 tokens: the last takes 0.43 to 0.88 of
# the first one's time. (Heads of 16 have one: small tiles took longer there.) Chunks smaller than the
# head are the same in all kernels: rounded in another order, scores of 100 and more would no longer fit
# the sums that the forward left. HOPPER_KERNELS have tiles for just these head sizes; where it has one,
# "hopper_forward" runs in place of "forward". Its largest takes all registers of an SM; with 128 registers
# two programs share one, which gains nothing where they end at different times, as causal ones do.
_UP_TO_64 = [Tile(192, 128, 4, 2), Tile(64, 128, 4, 2, 128)]
_PLANES = [Tile(128, 64, 8, 2)]
HOPPER_TILES = {
    ("hopper_forward", "16bit"): {
        16: _UP_TO_64,
        32: _UP_TO_64,
        64: _UP_TO_64,
        128: [Tile(128, 128, 4, 2), Tile(64, 64, 4, 2, 128), Tile(64, 128, 4, 2)],
    },
    ("hopper_backward", "16bit"): {
        16: [Tile(64, 128, 4, 3)],
        32: [Tile(64, 128, 4, 3)],
        64: [Tile(64, 128, 4, 3)],
        128: [Tile(64, 128, 4, 3)],
    },
    ("planes_forward", "ieee"): {32: _PLANES, 64: _PLANES, 128: [Tile(128, 32, 8, 2)]},
    ("planes_dq", "ieee"): {32: _PLANES, 64: _PLANES, 128: [Tile(64, 32, 4, 2)]},
    ("planes_dkdv", "ieee"): {size: [Tile(32, 64, 4, 2)] for size in (32, 64, 128)},
    ("forward", "16bit"): {
        64: [Tile(64, 128, 4, 3, 168)],
        128: [Tile(64, 64, 4, 3)],
        256: [Tile(128, 64, 8, 2)],
    },
    ("dq", "16bit"): {64: [Tile(64, 64, 4, 3)], 128: [Tile(128, 64, 8, 3)], 256: [Tile(64, 32, 8, 2)]},
    ("dkdv", "16bit"): {64: [Tile(64, 64, 4, 3)], 128: [Tile(64, 64, 4, 2)], 256: [Tile(32, 64, 8, 2)]},
    ("backward", "16bit"): {64: [Tile(64, 64, 4, 3)], 128: [Tile(32, 64, 4, 2)]},
    ("forward", "tf32"): {
        64: [Tile(32, 64, 4, 2, 168)],
        128: [Tile(32, 64, 4, 2)],
        256: [Tile(16, 16, 4, 1)],
    },
    ("dq", "tf32"): {64: [Tile(32, 64, 4, 2)], 128: [Tile(64, 32, 4, 2)], 256: [Tile(16, 16, 8, 1)]},
    ("dkdv", "tf32"): {64: [Tile(64, 64, 4, 2)], 128: [Tile(32, 64, 8, 2)], 256: [Tile(16, 16, 8, 1)]},
    ("backward", "tf32"): {64: [Tile(32, 64, 4, 2)], 128: [Tile(16, 16, 8, 2)]},
    ("forward", "ieee"): {
        16: [Tile(64, 64, 4, 2)],
        32: [Tile(64, 64, 4, 2), Tile(16, 64, 4, 2)],
        64: [Tile(64, 64, 4, 2), Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)],
        128: [Tile(32, 64, 8, 2, chunk=128), Tile(16, 64, 8, 2)],
        256: [Tile(32, 32, 8, 1, chunk=32)],
    },
    ("dq", "ieee"): {
        16: [Tile(64, 64, 4, 2)],
        32: [Tile(64, 64, 4, 2), Tile(16, 64, 4, 2)],
        64: [Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)],
        128: [Tile(16, 64, 8, 2)],
        256: [Tile(16, 32, 8, 1, chunk=32)],
    },
    ("dkdv", "ieee"): {
        16: [Tile(64, 64, 4, 2)],
        32: [Tile(64, 128, 8, 2, chunk=32), Tile(32, 16, 4, 2)],
        64: [Tile(32, 32, 4, 2), Tile(64, 16, 8, 2)],
        128: [Tile(64, 16, 8, 2)],
        256: [Tile(16, 16, 8, 1, chunk=32)],
    },
    ("backward", "ieee"): {
        16: [Tile(64, 64, 4, 2)],
        32: [Tile(32, 16, 4, 2)],
        64: [Tile(32, 32, 8, 2, chunk=64)],
        128: [Tile(32, 32, 8, 2, chunk=128)],
    },
}
PARTS_ROWS = 8  # of a program that adds parts; divides all tiles
PARTS_TILE = Tile(PARTS_ROWS, PARTS_ROWS, 4, 1)
PRE_POST_TILE = Tile(64, 128, 4, 1)  # of the kernels before and after "hopper_backward"
SPLIT_TILE = Tile(32, 32, 4, 1)  # of the kernel before PLANES_KERNELS
PORTABLE_TILES = {
    ("forward", "16bit"): {64: [Tile(64, 64, 4, 3)], 128: [Tile(128, 32, 8, 3)], 256: [Tile(64, 32, 8, 2)]},
    ("dq", "16bit"): {64: [Tile(64, 64, 4, 2)], 128: [Tile(64, 32, 4, 2)], 256: [Tile(64, 32, 8, 1)]},
    ("dkdv", "16bit"): {64: [Tile(32, 64, 4, 2)], 128: [Tile(32, 64, 8, 2)], 256: [Tile(32, 32, 8, 1)]},
    ("backward", "16bit"): {64: [Tile(32, 64, 4, 2)], 128: [Tile(32, 64, 8, 2)]},
    ("forward", "tf32"): {64: [Tile(64, 32, 4, 2)], 128: [Tile(32, 32, 4, 2)], 256: [Tile(16, 16, 4, 1)]},
    ("dq", "tf32"): {64: [Tile(32, 32, 4, 2)], 128: [Tile(32, 32, 8, 1)], 256: [Tile(16, 16, 8, 1)]},
    ("dkdv", "tf32"): {64: [Tile(32, 32, 4, 1)], 128: [Tile(16, 16, 4, 1)], 256: [Tile(16, 16, 8, 1)]},
    ("backward", "tf32"): {64: [Tile(32, 32, 4, 1)], 128: [Tile(16, 16, 4, 1)]},
    ("forward", "ieee"): {
        64: [Tile(32, 32, 4, 2)],
        128: [Tile(16, 32, 4, 2)],
        256: [Tile(16, 16, 8, 1, chunk=32)],
    },
    ("dq", "ieee"): {
        64: [Tile(32, 32, 4, 2)],
        128: [Tile(16, 32, 4, 1)],
        256: [Tile(16, 32, 8, 1, chunk=32)],
    },
    ("dkdv", "ieee"): {
        64: [Tile(16, 32, 4, 2)],
        128: [Tile(16, 16, 4, 1)],
        256: [Tile(16, 16, 8, 1, chunk=32)],
    },
    ("backward", "ieee"): {
        64: [Tile(16, 32, 4, 2)],
        128: [Tile(16, 16, 4, 1)],
    },
}
INTERPRETER_TILE = Tile(64, 64, 4, 1)


@dataclass(frozen=True)
class ShortWalks:
    """The tile of walks over up to so many keys, or a quarter of them if not causal, that are many.

    What a program does once takes as long as several tiles of keys: where walks are short, programs that
    share an SM do it while others multiply.
    """

    keys: int
    tile: Tile


# Measured on an H200: 1,024 tokens, 256 causal heads of 64 take 0.65 of the largest tile's time, heads of 128
# 0.73; 4,096 tokens, 64 causal heads of 64, 0.93. Above, the largest tile is as fast or faster.
_SHORT = ShortWalks(4096, Tile(64, 64, 4, 3, 80))
SHORT_WALKS = {
    ("hopper_forward", "16bit"): {64: _SHORT, 128: ShortWalks(2048, Tile(64, 64, 4, 2, 128))},
}
# From this head size on "hopper_forward" is persistent also where walks are long: heads of 64 and 128 take
# 0.93 to 1.01 of the time then, heads of 16 0.99 to 1.0, heads of 32 1.06 to 1.08 (1 to 64 heads of 4,096 to
# 65,536 tokens, the two in turns).
PERSISTENT_HEADS = 64


@dataclass(frozen=True)
class SplitLimits:
    """Into how many parts a walk over keys or queries is split, whose parts another kernel adds.

    Parts pay where SMs have nothing to do, and where causal programs end at different times; they cost what
    is written and read again. So there are up to `most`, of `shortest` rows or more, if there can be four of
    those: so many that an SM has `few` programs, or `many`, if a part has `long` rows for each program that
    an SM had before.
    """

    shortest: int
    long: int
    many: int
    most: int
    few: int = 0


# By kernel, precision and largest head size. Measured on an H200, 1 to 16 heads of 256 to 16,384 tokens.
_PLANES_BACKWARD = {128: SplitLimits(shortest=128, long=512, many=4, most=8, few=2)}
SPLITS = {
    ("forward", "16bit"): {256: SplitLimits(shortest=256, long=2048, many=4, most=4)},
    ("backward", "16bit"): {
        64: SplitLimits(shortest=256, long=1024, many=8, most=4),
        256: SplitLimits(shortest=128, long=704, many=11, most=4),
    },
    ("forward", "ieee"): {
        32: SplitLimits(shortest=64, long=256, many=8, most=8),
        128: SplitLimits(shortest=64, long=512, many=8, most=8, few=1),
        256: SplitLimits(shortest=64, long=256, many=8, most=8),
    },
    ("backward", "ieee"): {
        32: SplitLimits(shortest=32, long=128, many=8, most=8),
        256: SplitLimits(shortest=32, long=512, many=8, most=8, few=1),
    },
    ("planes_forward", "ieee"): {128: SplitLimits(shortest=128, long=1024, many=2, most=8, few=1)},
    ("planes_dq", "ieee"): _PLANES_BACKWARD,
    ("planes_dkdv", "ieee"): _PLANES_BACKWARD,
}
SPLITS |= {(kernel, "tf32"): SPLITS[kernel, "16bit"] for kernel in ("forward", "backward")}


@dataclass(frozen=True, eq=False)  # each is its own key of a cache: all this would be hashed at every launch
class KernelConfig:
    """How tensors of one dtype and head size are worked on by one kind of GPU."""

    dtype: torch.dtype
    precision: str  # one of PRECISIONS
    dot_precision: str  # tl.dot's input_precision
    block_d: int  # the head size, rounded up to a power of two
    use_tma: bool  # TMA loads the tiles; otherwise threads do, by pointers
    tiles: dict[str, tuple[Tile, ...]]  # of every kernel that may run, from large to small
    splits: dict[str, SplitLimits]  # of those whose walk can be split
    short_walks: dict[str, ShortWalks]  # of those that have a tile for them
    sm_count: int

    def with_tiles(self, **tiles: Tile | None) -> "KernelConfig":
        """The same with one tile for each of these kernels, or without the kernel for None."""
        changed = self.tiles | {kernel: (tile,) for kernel, tile in tiles.items()}
        changed = {kernel: each for kernel, each in changed.items() if None not in each}
        short_walks = {kernel: each for kernel, each in self.short_walks.items() if kernel not in tiles}
        return replace(self, tiles=changed, short_walks=short_walks)

    def all_tiles(self, kernel: str) -> tuple[Tile, ...]:
        """Every tile that this kernel may run with; none if it does not run."""
        short = [self.short_walks[kernel].tile] if kernel in self.short_walks else []
        return tuple(dict.fromkeys((*self.tiles.get(kernel, ()), *short)))


@cache
def select_config(
    dtype: torch.dtype, d_head: int, capability: Capability, sm_count: int, allow_tf32: bool = False
) -> KernelConfig:
    """The kernels, tiles and precision for tensors of this dtype and head size.

    Args:
        capability: of the GPU, (9, 0) for Hopper; or INTERPRETER.
        sm_count: how many SMs it has.
        allow_tf32: multiply float32 in TF32.
    """
    precision = "16bit" if dtype.itemsize == 2 else "tf32" if allow_tf32 else "ieee"
    block_d = max(16, 1 << (d_head - 1).bit_length())
    hopper = capability[0] == 9
    if capability == INTERPRETER:
        tiles = dict.fromkeys(KERNELS, (INTERPRETER_TILE,))
    else:
        table = HOPPER_TILES if hopper else PORTABLE_TILES
        runs = [kernel for kernel in KERNELS if max(table[kernel, precision]) >= block_d]
        runs += [kernel for kernel in HOPPER_KERNELS if block_d in table.get((kernel, precision), {})]
        tiles = {kernel: tuple(_up_to(table[kernel, precision], block_d)) for kernel in runs}
    by_size = [
        {kernel: table[kernel, precision] for kernel in tiles if (kernel, precision) in table}
        for table in (SPLITS, SHORT_WALKS)
    ]
    return KernelConfig(
        dtype,
        precision,
        _ieee_precision(capability) if precision == "ieee" else "tf32",
        block_d,
        _use_tma(capability, precision, block_d),
        tiles,
        *({kernel: _up_to(sizes, block_d) for kernel, sizes in each.items()} for each in by_size),
        sm_count,
    )


def _up_to(sizes: dict[int, Any], block_d: int) -> Any:
    """What is for the smallest of these head sizes that is large enough."""
    return sizes[min(size for size in sizes if size >= block_d)]


def _ieee_precision(capability: Capability) -> str:
    """How float32 keeps its bits in a matmul: as three bfloat16 each (six matmuls), or two TF32 (three).

    The first has 0.3 to 0.6 of the error of PyTorch's attention on an H200, and is Hopper's. The second needs
    fewer registers and is faster where programs are few, but was off by 2.5 to 3.2 times as much as PyTorch's
    in dK and dV of large scores: on other GPUs, which have no registers for the first. (On Hopper, only the
    kernels for all GPUs ask: float32_planes splits by itself.)
    """
    return "bf16x6" if capability[0] == 9 else "tf32x3"


def _use_tma(capability: Capability, precision: str, block_d: int) -> bool:
    """Whether TMA loads the tiles: where there is one, and where that does not cost registers.

    Matmuls in "ieee" of tiles that it loaded take up to twice the registers. And the host makes a descriptor
    for each tensor at every launch: of a short sequence that is time that the GPU waits.
    """
    if capability[0] == 9:
        return precision == "16bit" or (precision == "tf32" and block_d <= 128)
    return capability == INTERPRETER or (capability[0] > 9 and precision == "16bit" and block_d <= 128)
