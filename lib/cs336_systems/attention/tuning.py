"""Tile sizes: which configuration each kernel runs with, decided by the GPU, the dtype and the head size."""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Tile:
    """block_m queries by block_n keys a program; warps, pipeline stages; registers a thread (None: the compiler's)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


# (kernel, bytes per element, head size rounded up to a power of two) -> Tile.
HOPPER = {
    ("forward", 2, 64): Tile(128, 64, 4, 3),
    ("forward", 2, 128): Tile(128, 64, 8, 3),
    ("fused", 2, 64): Tile(64, 128, 8, 2),
    ("fused", 2, 128): Tile(64, 64, 8, 2),
    ("dkdv", 2, 64): Tile(64, 128, 8, 3),
    ("dkdv", 2, 128): Tile(64, 64, 8, 2),
    ("dq", 2, 64): Tile(128, 64, 8, 3),
    ("dq", 2, 128): Tile(128, 64, 8, 2),
}
# Ampere, Ada, Blackwell: what fits the smallest of them (99 KiB of shared memory a block).
PORTABLE = {}
EXACT = "tf32x3"  # float32 as three TF32 products: as near as sums in float32 are
INTERPRETED = Tile(64, 64, 4, 1)


@cache
def tile_for(kernel: str, itemsize: int, block_d: int, capability: tuple[int, int]) -> Tile:
    """The tile of "forward", "fused", "dkdv" or "dq" on a GPU of this compute capability; (0, 0): the interpreter."""
    if capability == (0, 0):
        return INTERPRETED
    table = HOPPER if capability[0] == 9 else PORTABLE
    return table[kernel, itemsize, max(block_d, 64)]
