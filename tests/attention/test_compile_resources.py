"""The shipped tiles fit three generations of GPU, told without having one."""

import pandas as pd
import pytest

pytest.importorskip("triton")
import triton

from cs336_systems.attention.compile_resources import compile_tiles, tuning_for_capability
from cs336_systems.attention.tiles import HOPPER_KERNELS, KERNELS
from labbook import load_rows
from labbook.runs import load_run

SMALLEST_SHARED_MEMORY = 101_376
# And the fastest of their tiles all the same. Those of 16 bits spill outside of their loops.
SPILLING = {(kernel, d) for kernel in ("forward", "backward", "hopper_backward") for d in (64, 128)}
SPILLING |= {("bf16x3_dkdv", 128), ("dq", 32)}
PLACE = ("flash_forward", "ahead_of_time", "kernel_resources")
# Of GPUs that have no rows, or none with this kernel: Ada, Blackwell for data centers and for desktops.
OTHERS = [
    ("forward", "bfloat16", 64, 89),
    ("forward", "bfloat16", 64, 103),
    ("dkdv", "bfloat16", 128, 120),
]
SAMPLE = [
    ("hopper_backward", "bfloat16", 128, 90),
    ("dq", "tf32", 64, 80),
    ("dkdv", "float32", 64, 80),
]


def test_no_other_tile_spills_or_exceeds_the_chip():
    """The committed rows say it of every tile. To compile all takes minutes: once a change of the kernels."""
    table = load_rows(*PLACE)
    assert (table["registers"] <= 255).all()
    spilling = table[table["spilled_bytes"] > 0]
    assert set(zip(spilling["kernel"], spilling["d_head"], strict=True)) == SPILLING, (
        spilling.to_string()
    )
    assert (table["shared_bytes"] <= table["shared_limit_bytes"]).all()
    portable = table[table["capability"] != 90]
    assert (portable["shared_bytes"] <= SMALLEST_SHARED_MEMORY).all(), portable.to_string()


def test_the_rows_are_of_todays_tiles():
    """Where they are not: notebook 24 with all_tiles=True writes them anew."""
    table = load_rows(*PLACE)
    assert set(table["kernel"]) == set(KERNELS + HOPPER_KERNELS)
    assert set(table["capability"]) == {80, 90, 100}
    for (kernel, dtype, *sizes), rows in table.groupby(["kernel", "dtype", "d_head", "capability"]):
        tiles = [
            tile.row() for tile in tuning_for_capability(dtype, *map(int, sizes)).all_tiles(kernel)
        ]
        recorded = rows.astype(object).where(rows.notna(), None)[list(tiles[0])]
        assert set(recorded.itertuples(index=False, name=None)) == {
            tuple(tile.values()) for tile in tiles
        }


def test_the_compiler_says_again_what_the_rows_say():
    found = pd.DataFrame(compile_tiles(SAMPLE))
    assert list(found["kernel"]) == [kernel for kernel, *_ in SAMPLE]
    recorded = load_rows(*PLACE)
    run = load_run("ahead_of_time", recorded["run"][0])
    if run.triton == triton.__version__:  # another version allocates registers in its own way
        keys = ["kernel", "dtype", "d_head", "capability", "block_m", "block_n"]
        both = found.merge(recorded, on=keys, suffixes=("", "_recorded"))
        assert len(both) == len(SAMPLE)
        for what in ("registers", "spilled_bytes", "shared_bytes"):
            assert list(both[what]) == list(both[f"{what}_recorded"])


def test_other_gpus_get_tiles_that_fit_and_do_not_spill():
    """By TMA the last would spill 2.5 kB a thread."""
    rows = pd.DataFrame(compile_tiles(OTHERS))
    assert list(rows["capability"]) == [capability for *_, capability in OTHERS]
    assert (rows["spilled_bytes"] == 0).all(), rows.to_string()
    assert (rows["shared_bytes"] <= SMALLEST_SHARED_MEMORY).all(), rows.to_string()
