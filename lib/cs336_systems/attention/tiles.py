"""The kernels and tiles for a dtype and head size on a GPU; TMA or pointers. `choose` picks from these.

There is no autotuner: it would measure again in every process, and its choice would change from run to run.
By ptxas 12.8 (Triton 3.6 and 3.7; `compile_resources` asks others) threads spill registers of

    Hopper's own kernels, in any form    none, but hopper_backward up to 100 bytes
    the others, causal                   none
    the others, in other forms           none, but a few of "ieee" up to 24 bytes, if their loop is split 144

But two float32 tiles for heads of 128 spill, and yet are fastest: bf16x3_dkdv's, 1.3 kB (two others, which
spill 0.5, took 1.36 times as long, and the same kernel in Gluon, without spills, 1.15 times), and backward's,
804 bytes (another, which spills 108, took 1.4 times as long).

Hopper's tiles were chosen by measurements on an H200. The portable ones, for all other GPUs, were only
compiled: they fit the 99 KiB of shared memory that a block has on the smallest.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

KERNELS = ("forward", "dq", "dkdv", "backward")  # in Triton, for every GPU
GLUON_KERNELS = ("hopper_forward", "hopper_backward")  # for Hopper alone, as are
# Triton's, of operands in three parts
BF16X3_KERNELS = ("bf16x3_forward", "bf16x3_dq", "bf16x3_dkdv")
HOPPER_KERNELS = GLUON_KERNELS + BF16X3_KERNELS
# Whose programs own keys; those of others own queries, of "backward" one or the other.
OWN_KEYS = ("dkdv", "hopper_backward", "bf16x3_dkdv")
# How many programs each SM should get, if not one: the longest causal ones take as long as two on average.
PROGRAMS_PER_SM = {"hopper_forward": 1.75} | dict.fromkeys(BF16X3_KERNELS, 0.45)
# "hopper_backward" runs from more queries than these on, by head size: without a causal mask, and with one.
# Up to them "dq" and "dkdv" take at most 0.98 of its time (heads of 64 and 128, 256 to 1,024 of them, H100).
HOPPER_BACKWARD_LENGTH = dict.fromkeys((16, 32, 64), (512, 1024)) | {128: (256, 768)}
# BF16X3_KERNELS run from so many queries and keys on, by head size, where programs are enough.
BF16X3_LENGTH = {32: 2048, 64: 512, 128: 512}
# "backward" runs in place of "dq" and "dkdv" up to this many programs an SM, or where its loop is split.
ONE_LAUNCH = {"16bit": 2, "tf32": 2, "ieee": 1}
WARP_GROUP_ROWS = 64  # of what a program owns, to a matmul of four warps
Capability = tuple[int, int]
INTERPRETER: Capability = (0, 0)  # in place of a compute capability


@dataclass(frozen=True)
class Tile:
    """block_m queries by block_n keys; at most max_registers a thread (0: the compiler decides).

    With a chunk, scores are made of so many dimensions at a time (see triton_common).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0
    chunk: int = 0

    def row(self) -> dict[str, int | None]:
        """Its columns in tables of rows."""
        numbers = vars(self).items()
        return {name: number or None for name, number in numbers}


def _rows(kind: type, text: str) -> dict[tuple[str, str], dict[int, list[Any]]]:
    """A table in words: {(kernel, precision): {largest head size: [of each row a `kind`]}}.

    HOPPER_TILES["dkdv", "16bit"] is {64: [Tile(64, 64, 4, 3)], 128: [Tile(64, 64, 4, 2)], 256: [...]}.
    """
    table: dict = defaultdict(lambda: defaultdict(list))
    for row in text.strip().splitlines()[1:]:
        kernel, precision, d, *numbers = row.split()
        table[kernel, precision][int(d)].append(kind(*map(int, numbers)))
    return dict(table)


# Precisions: "16bit", bfloat16 and float16; "tf32", float32 in TF32; "ieee", float32 with all bits. Heads:
# the largest head size that a tile is for.
#
# Of several tiles the first that makes a program for every SM (or PROGRAMS_PER_SM) runs, else the last: in
# "ieee" matmuls are so slow that an SM at work counts for more than a large tile. Measured on an H200, one
# head of 1,024 and 4,096 tokens: the last takes 0.43 to 0.88 of the first one's time. (Heads of 16 have one:
# small tiles took longer there.)
#
# Chunks smaller than the head are the same in all kernels: rounded in another order, scores of 100 and more
# would no longer fit the L that the forward left.
#
# "hopper_forward" runs in place of "forward" where it has a tile. Its largest takes all registers of an SM;
# with 128 registers two programs share one, which gains nothing where they end at different times, as causal
# ones do.
HOPPER_TILES = _rows(
    Tile,
    """
# kernel        precision heads  queries  keys  warps  stages  registers  chunk
hopper_forward  16bit        64      192   128      4       2          0      0
hopper_forward  16bit        64       64   128      4       2        128      0
hopper_forward  16bit       128      128   128      4       2          0      0
hopper_forward  16bit       128       64    64      4       2        128      0
hopper_forward  16bit       128       64   128      4       2          0      0
hopper_backward 16bit       128       64   128      4       3          0      0
bf16x3_forward  ieee         64      128    64      8       2          0      0
bf16x3_forward  ieee        128      128    32      8       2          0      0
bf16x3_dq       ieee         64      128    64      8       2          0      0
bf16x3_dq       ieee        128       64    32      4       2          0      0
bf16x3_dkdv     ieee        128       32    64      4       2          0      0
forward         16bit        64       64   128      4       3        168      0
forward         16bit       128       64    64      4       3          0      0
forward         16bit       256      128    64      8       2          0      0
dq              16bit        64       64    64      4       3          0      0
dq              16bit       128      128    64      8       3          0      0
dq              16bit       256       64    32      8       2          0      0
dkdv            16bit        64       64    64      4       3          0      0
dkdv            16bit       128       64    64      4       2          0      0
dkdv            16bit       256       32    64      8       2          0      0
backward        16bit        64       64    64      4       3          0      0
backward        16bit       128       32    64      4       2          0      0
forward         tf32         64       32    64      4       2        168      0
forward         tf32        128       32    64      4       2          0      0
forward         tf32        256       16    16      4       1          0      0
dq              tf32         64       32    64      4       2          0      0
dq              tf32        128       64    32      4       2          0      0
dq              tf32        256       16    16      8       1          0      0
dkdv            tf32         64       64    64      4       2          0      0
dkdv            tf32        128       32    64      8       2          0      0
dkdv            tf32        256       16    16      8       1          0      0
backward        tf32         64       32    64      4       2          0      0
backward        tf32        128       16    16      8       2          0      0
forward         ieee         16       64    64      4       2          0      0
forward         ieee         32       64    64      4       2          0      0
forward         ieee         32       16    64      4       2          0      0
forward         ieee         64       64    64      4       2          0      0
forward         ieee         64       32    64      8       2          0      0
forward         ieee         64       16    64      8       2          0      0
forward         ieee        128       32    64      8       2          0    128
forward         ieee        128       16    64      8       2          0      0
forward         ieee        256       32    32      8       1          0     32
dq              ieee         16       64    64      4       2          0      0
dq              ieee         32       64    64      4       2          0      0
dq              ieee         32       16    64      4       2          0      0
dq              ieee         64       32    64      8       2          0      0
dq              ieee         64       16    64      8       2          0      0
dq              ieee        128       16    64      8       2          0      0
dq              ieee        256       16    32      8       1          0     32
dkdv            ieee         16       64    64      4       2          0      0
dkdv            ieee         32       64   128      8       2          0     32
dkdv            ieee         32       32    16      4       2          0      0
dkdv            ieee         64       32    32      4       2          0      0
dkdv            ieee         64       64    16      8       2          0      0
dkdv            ieee        128       64    16      8       2          0      0
dkdv            ieee        256       16    16      8       1          0     32
backward        ieee         16       64    64      4       2          0      0
backward        ieee         32       32    16      4       2          0      0
backward        ieee         64       32    32      8       2          0     64
backward        ieee        128       32    32      8       2          0    128
""",
)
MERGE_TILE = Tile(8, 8, 4, 1)  # of the kernels after split loops; its rows divide all tiles
PRE_POST_TILE = Tile(64, 128, 4, 1)  # of the kernels before and after "hopper_backward"
BF16X3_TILE = Tile(32, 32, 4, 1)  # of the kernel before BF16X3_KERNELS
PORTABLE_TILES = _rows(
    Tile,
    """
# kernel        precision heads  queries  keys  warps  stages  registers  chunk
forward         16bit        64       64    64      4       3          0      0
forward         16bit       128      128    32      8       3          0      0
forward         16bit       256       64    32      8       2          0      0
dq              16bit        64       64    64      4       2          0      0
dq              16bit       128       64    32      4       2          0      0
dq              16bit       256       64    32      8       1          0      0
dkdv            16bit        64       32    64      4       2          0      0
dkdv            16bit       128       32    64      8       2          0      0
dkdv            16bit       256       32    32      8       1          0      0
backward        16bit        64       32    64      4       2          0      0
backward        16bit       128       32    64      8       2          0      0
forward         tf32         64       64    32      4       2          0      0
forward         tf32        128       32    32      4       2          0      0
forward         tf32        256       16    16      4       1          0      0
dq              tf32         64       32    32      4       2          0      0
dq              tf32        128       32    32      8       1          0      0
dq              tf32        256       16    16      8       1          0      0
dkdv            tf32         64       32    32      4       1          0      0
dkdv            tf32        128       16    16      4       1          0      0
dkdv            tf32        256       16    16      8       1          0      0
backward        tf32         64       32    32      4       1          0      0
backward        tf32        128       16    16      4       1          0      0
forward         ieee         64       32    32      4       2          0      0
forward         ieee        128       16    32      4       2          0      0
forward         ieee        256       16    16      8       1          0     32
dq              ieee         64       32    32      4       2          0      0
dq              ieee        128       16    32      4       1          0      0
dq              ieee        256       16    32      8       1          0     32
dkdv            ieee         64       16    32      4       2          0      0
dkdv            ieee        128       16    16      4       1          0      0
dkdv            ieee        256       16    16      8       1          0     32
backward        ieee         64       16    32      4       2          0      0
backward        ieee        128       16    16      4       1          0      0
""",
)
INTERPRETER_TILE = Tile(64, 64, 4, 1)


# Where there are enough programs of short sequences of heads up to 64, "hopper_forward" has another tile, up
# to this length, or a quarter of it if not causal. What a program does once takes as long as several tiles of
# keys, and programs that share an SM do it while others multiply. Measured on an H200: 1,024 tokens, 256
# causal heads of 64 take 0.65 of the largest tile's time; 4,096 tokens, 64 causal heads, 0.93. Above, the
# largest tile is as fast or faster. For heads of 128 it is so from 256 tokens on: 1.06 to 1.17 times as fast
# as 64 by 64 on an H100.
SHORT_LENGTH = 4096
SHORT_TILE = Tile(64, 64, 4, 3, 80)
# From this head size on "hopper_forward" is persistent for long sequences too: heads of 64 and 128 take 0.93
# to 1.01 of the time then, heads of 16 0.99 to 1.0, heads of 32 1.06 to 1.08 (1 to 64 heads of 4,096 to
# 65,536 tokens, measured in turns).
PERSISTENT_HEADS = 64


@dataclass(frozen=True)
class SplitLimits:
    """Into how many splits a kernel's loop over keys or queries is cut, whose results another kernel merges.

    Splits pay where SMs would idle, and where causal programs end at different times; they cost what is
    written and read again. So there are up to `most`, of `shortest` rows or more, if there can be four of
    those: so many that an SM has `few` programs, or `many`, if a split has `long` rows for each program that
    an SM had before.
    """

    shortest: int
    long: int
    many: int
    most: int
    few: int = 0


# By kernel, precision and largest head size. Measured on an H200, 1 to 16 heads of 256 to 16,384 tokens.
SPLITS = _rows(
    SplitLimits,
    """
# kernel        precision heads  shortest  long  many  most  few
backward        16bit        64       256  1024     8     4    0
backward        16bit       256       128   704    11     4    0
backward        tf32         64       256  1024     8     4    0
backward        tf32        256       128   704    11     4    0
backward        ieee         32        32   128     8     8    0
backward        ieee        256        32   512     8     8    1
bf16x3_dkdv     ieee        128       128   512     4     8    2
bf16x3_dq       ieee        128       128   512     4     8    2
bf16x3_forward  ieee        128       128  1024     2     8    1
forward         16bit       256       256  2048     4     4    0
forward         tf32        256       256  2048     4     4    0
forward         ieee         32        64   256     8     8    0
forward         ieee        128        64   512     8     8    1
forward         ieee        256        64   256     8     8    0
""",
)


@dataclass(frozen=True, eq=False)  # hashed by identity: it is a key of caches
class Tuning:
    """How tensors of one dtype and head size are computed on by one kind of GPU."""

    dtype: torch.dtype
    precision: str  # of the tables above
    dot_precision: str  # of triton_common
    block_d: int  # the head size, rounded up to a power of two
    use_tma: bool  # TMA loads the tiles; otherwise threads do, by pointers
    tiles: dict[str, tuple[Tile, ...]]  # of every kernel that may run, from large to small
    splits: dict[str, SplitLimits]  # of those whose loop can be split
    short: Tile | None  # SHORT_TILE, where it may run
    sm_count: int

    def with_tiles(self, **tiles: Tile | None) -> "Tuning":
        """The same with one tile for each of these kernels, or without the kernel for None."""
        kept = {kernel: those for kernel, those in self.tiles.items() if kernel not in tiles}
        changed = {kernel: (tile,) for kernel, tile in tiles.items() if tile}
        short = None if "hopper_forward" in tiles else self.short
        return replace(self, tiles=kept | changed, short=short)

    def all_tiles(self, kernel: str) -> tuple[Tile, ...]:
        """Every tile that this kernel may run with; none if it does not run."""
        tiles = self.tiles.get(kernel, ())
        is_short = self.short and kernel == "hopper_forward"
        return tiles + (self.short,) if is_short else tiles


@cache
def select_tuning(
    dtype: torch.dtype, d_head: int, capability: Capability, sm_count: int, allow_tf32: bool = False
) -> Tuning:
    """The kernels, tiles and precision for tensors of this dtype and head size.

    | capability | tiles | by TMA | float32 with all its bits |
    |:--|:--|:--|:--|
    | 9.x | HOPPER_TILES | 16 bits, TF32 up to heads of 128 | bf16x6, and BF16X3_KERNELS |
    | 10.x, 11.x | PORTABLE_TILES | 16 bits up to heads of 128 | tf32x3 |
    | others | PORTABLE_TILES | nothing | tf32x3 |
    | INTERPRETER | INTERPRETER_TILE | everything | tf32x3 |

    Args:
        capability: of the GPU, (9, 0) for Hopper; or INTERPRETER.
        sm_count: how many SMs it has.
        allow_tf32: multiply float32 in TF32.
    """
    precision = "16bit" if dtype.itemsize == 2 else "tf32" if allow_tf32 else "ieee"
    block_d = max(16, 1 << (d_head - 1).bit_length())
    table = HOPPER_TILES if capability[0] == 9 else PORTABLE_TILES
    if capability == INTERPRETER:
        tiles = dict.fromkeys(KERNELS, (INTERPRETER_TILE,))
    else:
        # Of this precision, where the table goes up to such heads; in three parts of BF16X3_LENGTH's alone.
        tiles = {
            kernel: tuple(_up_to(sizes, block_d))
            for (kernel, each), sizes in table.items()
            if each == precision and max(sizes) >= block_d
            if kernel not in BF16X3_KERNELS or block_d in BF16X3_LENGTH
        }
    loops = [kernel for kernel in tiles if (kernel, precision) in SPLITS]
    splits = {kernel: _up_to(SPLITS[kernel, precision], block_d)[0] for kernel in loops}
    short = SHORT_TILE if "hopper_forward" in tiles and block_d <= 64 else None
    # Float32 keeps its bits in a matmul as three bfloat16 each (six matmuls), or two TF32 (three). The first
    # has 0.3 to 0.6 of the error of PyTorch's attention on an H200, and is Hopper's. The second needs fewer
    # registers and is faster where programs are few, but was off by 2.5 to 3.2 times as much as PyTorch's in
    # dK and dV of large scores: on other GPUs, which have no registers for the first. (BF16X3_KERNELS have a
    # precision of their own.)
    dot = "tf32" if precision != "ieee" else "bf16x6" if capability[0] == 9 else "tf32x3"
    # TMA loads the tiles where there is one, and where that does not cost registers: matmuls in "ieee" of
    # tiles that it loaded take up to twice the registers. On 12.x (RTX 50, without tcgen05) 16 bits by TMA
    # spill, with Triton 3.6 to 3.9 alike: the backward of heads of 128 2.5 to 2.9 kB a thread, of heads of 64
    # 208 bytes (3.9). By pointers it spills nothing.
    if capability[0] == 9:
        use_tma = precision == "16bit" or (precision == "tf32" and block_d <= 128)
    else:
        by_tma = precision == "16bit" and block_d <= 128 and capability[0] in (10, 11)
        use_tma = by_tma or capability == INTERPRETER
    return Tuning(dtype, precision, dot, block_d, use_tma, tiles, splits, short, sm_count)


def _up_to(sizes: dict[int, list[Any]], block_d: int) -> list[Any]:
    """What is for the smallest of these head sizes that is large enough."""
    return sizes[min(size for size in sizes if size >= block_d)]
