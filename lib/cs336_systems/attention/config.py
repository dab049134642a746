"""Tile sizes: which configuration a kernel runs with, decided by GPU, arithmetic and head size.

There is no autotuner: it would measure again in every process, and its choice would change from run to run.
No tile spills registers, as notebook 24 compiles them: causal (one of exact float32 40 bytes with Triton 3.6,
none with 3.7). In their other forms a few of exact float32 spill up to 24 bytes. Hopper's were chosen by
measurements on an H200: within 1 % of the fastest forward at 16,384 tokens, and within 11 % of the fastest dq
and dkdv, which run there on short sequences (notebook 26 has the study); those of exact float32 for
many programs and for few. The portable ones, for all other GPUs, were only compiled: they fit the 99 KiB of
shared memory that a block has on the smallest of them.
"""

from dataclasses import dataclass
from functools import cache

KERNELS = ("forward", "dq", "dkdv")
HOPPERS_OWN = ("hopper_forward", "hopper_backward")
INTERPRETER = (0, 0)  # in place of a compute capability


@dataclass(frozen=True)
class Tile:
    """block_m queries by block_n keys; at most maxnreg registers a thread (None: the compiler decides).

    With a chunk, scores are made of so many dimensions at a time (see kernels_forward).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    chunk: int = 0

    @property
    def case(self) -> str | None:
        """What the four numbers do not say, in words; None for nothing."""
        registers = f"at most {self.maxnreg} registers" if self.maxnreg else None
        words = registers, f"chunks of {self.chunk}" if self.chunk else None
        return ", ".join(filter(None, words)) or None


# (kernel, arithmetic): {largest head size: tile}. (16-bit forwards with heads of 33 to 128 run with BY_HAND's
# instead; these are where the tile study begins.)
# "half" is bfloat16 and float16; "tf32" and "exact" are float32.
HOPPER = {
    ("forward", "half"): {64: Tile(64, 128, 4, 3, 168), 128: Tile(64, 64, 4, 3), 256: Tile(128, 64, 8, 2)},
    ("dq", "half"): {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)},
    ("dkdv", "half"): {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 2)},
    ("forward", "tf32"): {64: Tile(32, 64, 4, 2, 168), 128: Tile(32, 64, 4, 2), 256: Tile(16, 16, 4, 1)},
    ("dq", "tf32"): {64: Tile(32, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(16, 16, 8, 1)},
    ("dkdv", "tf32"): {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(16, 16, 8, 1)},
}
# Exact products are so slow that a processor at work counts for more than a large tile: the first of these
# that makes a program for every processor runs, else the last. Measured on an H200, one head of 1,024 and
# 4,096 tokens: the last takes 0.43 to 0.88 of the first one's time. (Heads of 16 have one: small tiles took
# longer there.) Chunks that are smaller than the head are the same in all three kernels: rounded in
# another order, scores of 100 and more would no longer fit the sums that the forward left.
HOPPER_EXACT = {
    ("forward", "exact"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2), Tile(16, 64, 4, 2)),
        64: (Tile(64, 64, 4, 2), Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)),
        128: (Tile(32, 64, 8, 2, chunk=128), Tile(16, 64, 8, 2)),
        256: (Tile(32, 32, 8, 1, chunk=32),),
    },
    ("dq", "exact"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 64, 4, 2), Tile(16, 64, 4, 2)),
        64: (Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)),
        128: (Tile(16, 64, 8, 2),),
        256: (Tile(16, 32, 8, 1, chunk=32),),
    },
    ("dkdv", "exact"): {
        16: (Tile(64, 64, 4, 2),),
        32: (Tile(64, 128, 8, 2, chunk=32), Tile(32, 16, 4, 2)),
        64: (Tile(32, 32, 4, 2), Tile(64, 16, 8, 2)),
        128: (Tile(64, 16, 8, 2),),
        256: (Tile(16, 16, 8, 1, chunk=32),),
    },
}
# Of Hopper's own kernels.
BY_HAND = {
    ("hopper_forward", "half"): {64: Tile(64, 128, 4, 3), 128: Tile(64, 64, 4, 3)},
    ("hopper_backward", "half"): {64: Tile(64, 128, 8, 3), 128: Tile(64, 128, 8, 3)},
}
AROUND_SUMS = Tile(64, 128, 4, 1)  # of what runs before and after that backward
PORTABLE = {
    ("forward", "half"): {64: Tile(64, 64, 4, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 8, 2)},
    ("dq", "half"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 32, 8, 1)},
    ("dkdv", "half"): {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 32, 8, 1)},
    ("forward", "tf32"): {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(16, 16, 4, 1)},
    ("dq", "tf32"): {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    ("dkdv", "tf32"): {64: Tile(32, 32, 4, 1), 128: Tile(16, 16, 4, 1), 256: Tile(16, 16, 8, 1)},
    ("forward", "exact"): {
        64: Tile(32, 32, 4, 2),
        128: Tile(16, 32, 4, 2),
        256: Tile(16, 16, 8, 1, chunk=32),
    },
    ("dq", "exact"): {64: Tile(32, 32, 4, 2), 128: Tile(16, 32, 4, 1), 256: Tile(16, 32, 8, 1, chunk=32)},
    ("dkdv", "exact"): {64: Tile(16, 32, 4, 2), 128: Tile(16, 16, 4, 1), 256: Tile(16, 16, 8, 1, chunk=32)},
}
INTERPRETED = Tile(64, 64, 4, 1)


def arithmetic(itemsize: int, precision: str) -> str:
    """Name what is done with elements of itemsize bytes, multiplied at this input precision of tl.dot."""
    return "half" if itemsize == 2 else "tf32" if precision == "tf32" else "exact"


def exact_precision(capability: tuple[int, int]) -> str:
    """How float32 is multiplied exactly: as three bfloat16 each (six products), or two TF32 (three products).

    The first has 0.3 to 0.6 of the error of PyTorch's attention on an H200, and is Hopper's. The second needs
    fewer registers and is faster where programs are few, but was off by 2.5 to 3.2 times as much as PyTorch's
    in dK and dV of large scores: on other GPUs, which have no registers for the first.
    """
    return "bf16x6" if capability[0] == 9 else "tf32x3"


def uses_descriptors(capability: tuple[int, int], arithmetic: str, block_d: int) -> bool:
    """Whether the copy engine loads the tiles: where there is one, and where that does not cost registers.

    Exact products of tiles that it brought take up to twice the registers. And descriptors are made by the
    host, at every launch: of a short sequence that is time that the GPU waits.
    """
    if capability[0] == 9:
        return arithmetic == "half" or (arithmetic == "tf32" and block_d <= 128)
    return capability == INTERPRETER or (capability[0] > 9 and arithmetic == "half" and block_d <= 128)


def tile_by_hand(kernel: str, arithmetic: str, block_d: int, capability: tuple[int, int]) -> Tile | None:
    """The tile of one of HOPPERS_OWN; None where that kernel does not run."""
    return BY_HAND.get((kernel, arithmetic), {}).get(block_d) if capability[0] == 9 else None


@cache
def tiles_for(kernel: str, arithmetic: str, block_d: int, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """The tiles of "forward", "dq" or "dkdv" on a GPU of this compute capability, or in the interpreter.

    From large to small, for `plans.Problem.tile` to choose from; most have no alternative.
    """
    if capability == INTERPRETER:
        return (INTERPRETED,)
    several = capability[0] == 9 and arithmetic == "exact"
    table = HOPPER_EXACT if several else HOPPER if capability[0] == 9 else PORTABLE
    sizes = table[kernel, arithmetic]
    found = sizes[min(size for size in sizes if size >= block_d)]
    return found if several else (found,)
