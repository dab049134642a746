"""Every shipped tile, compiled for three generations of GPU without having one."""

import itertools
from importlib.metadata import version

import pandas as pd
import pytest

from cs336_systems.attention.config import HOPPER_KERNELS, KERNELS

pytest.importorskip("triton")
from cs336_systems.attention.compile_resources import compile_tiles, config_for_capability

CAPABILITIES = (80, 90, 100)
HEAD_SIZES = (16, 32, 64, 128, 256)
SMALLEST_SHARED_MEMORY = 101_376


def spills_and_may(row) -> bool:
    """Ten words with Triton 3.6, and none with 3.7."""
    place = tuple(row[["kernel", "dtype", "d_head", "capability", "block_n"]])
    return place == ("dkdv", "float32", 64, 90, 32) and row.spilled_bytes <= 40 * (version("triton") < "3.7")


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32", "float32"])
def test_no_tile_spills_or_exceeds_the_chip(dtype):
    work = list(itertools.product((*KERNELS, *HOPPER_KERNELS), [dtype], HEAD_SIZES, CAPABILITIES))
    table = pd.DataFrame(compile_tiles(work))
    columns = ["kernel", "dtype", "d_head", "capability", "block_m", "block_n"]
    assert list(table[columns].itertuples(index=False, name=None)) == [
        (kernel, *place, tile.block_m, tile.block_n)
        for kernel, *place in work
        for tile in config_for_capability(*place).tiles.get(kernel, ())
    ]
    assert (table.registers <= 255).all()
    assert (table.shared_bytes <= table.shared_limit_bytes).all()
    portable = table[table.capability != 90]
    assert (portable.shared_bytes <= SMALLEST_SHARED_MEMORY).all(), portable.to_string()
    spilling = table[(table.spilled_bytes > 0) & ~table.apply(spills_and_may, axis=1)]
    assert spilling.empty, spilling.to_string()


def test_what_does_not_compile_is_an_error():
    with pytest.raises(RuntimeError, match="compiling ahead of time failed"):
        compile_tiles([("forward", "bfloat16", 500, 80)])
