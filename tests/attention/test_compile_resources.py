"""The shipped tiles fit three generations of GPU, told without having one."""

import pandas as pd
import pytest

pytest.importorskip("triton")
import triton

from cs336_systems.attention.compile_resources import compile_tiles
from cs336_systems.bench.kernel_resources import shipped_tiles
from labbook.runs import load_run

SMALLEST_SHARED_MEMORY = 101_376
# And the fastest of their tiles all the same. Of all but the first two it is the split form, and 64 bytes at
# most.
SPILLING = {("planes_dkdv", 128), ("backward", 128), ("backward", 64), ("forward", 64), ("forward", 128)}
SAMPLE = [("hopper_backward", "bfloat16", 128, 90), ("dq", "tf32", 64, 80), ("dkdv", "float32", 64, 80)]


def test_no_other_tile_spills_or_exceeds_the_chip():
    """The committed rows say it of every tile. To compile all takes minutes: once a change of the kernels."""
    table = shipped_tiles()
    assert (table["registers"] <= 255).all()
    spilling = table[table["spilled_bytes"] > 0]
    assert set(zip(spilling["kernel"], spilling["d_head"], strict=True)) == SPILLING, spilling.to_string()
    assert (table["shared_bytes"] <= table["shared_limit_bytes"]).all()
    portable = table[table["capability"] != 90]
    assert (portable["shared_bytes"] <= SMALLEST_SHARED_MEMORY).all(), portable.to_string()


def test_the_compiler_says_again_what_the_rows_say():
    found = pd.DataFrame(compile_tiles(SAMPLE))
    assert list(found["kernel"]) == [kernel for kernel, *_ in SAMPLE]
    assert (found["spilled_bytes"] == 0).all()
    recorded = shipped_tiles()
    run = load_run("ahead_of_time", recorded["run"][0])
    if run.triton == triton.__version__:  # another version allocates registers in its own way
        keys = ["kernel", "dtype", "d_head", "capability", "block_m", "block_n"]
        both = found.merge(recorded, on=keys, suffixes=("", "_recorded"))
        assert len(both) == len(SAMPLE)
        for what in ("registers", "shared_bytes"):
            assert list(both[what]) == list(both[f"{what}_recorded"])


def test_what_does_not_compile_is_an_error():
    with pytest.raises(RuntimeError, match="compiling ahead of time failed"):
        compile_tiles([("forward", "bfloat16", 64, 20)])  # of no GPU that Triton knows
