"""Every configuration in the tuning table, compiled for three generations of GPU without having one."""

import itertools

import pytest

from cs336_systems.attention.tuning import HOPPERS_OWN, KERNELS

pytest.importorskip("triton")
from cs336_systems.attention.ahead_of_time import ARITHMETICS, resources, shipped

CAPABILITIES = (80, 90, 100)
HEAD_SIZES = (16, 32, 64, 128, 256)
SMALLEST_SHARED_MEMORY = 101_376


# Exact float32 splits each operand into two or three, in registers. These of Hopper's tiles for it (kernel,
# head size, queries, keys) spill, and are among the fastest measured all the same.
FAST_AND_SPILLING = {
    ("forward", 64, 64, 64),
    ("forward", 128, 64, 64),
    ("dq", 64, 64, 64),
    ("dq", 128, 128, 32),
    ("dq", 128, 64, 64),
    ("dq", 128, 16, 64),
    ("dkdv", 64, 64, 128),
    ("dkdv", 64, 32, 32),
    ("dkdv", 128, 32, 128),
    ("dkdv", 128, 32, 64),
    ("dkdv", 128, 64, 16),
}


def spills_and_may(line) -> bool:
    """Exact float32: at a head of 256 everywhere, and the tiles above; and three words with Triton 3.6."""
    place = line.kernel, line.d_head, line.block_m, line.block_n
    if line.arithmetic == "tf32":
        return line.capability == 90 and place == ("forward", 32, 32, 64) and line.spilled_bytes <= 12
    on_hopper = line.capability == 90 and place in FAST_AND_SPILLING
    return line.arithmetic == "exact" and (line.d_head == 256 or on_hopper)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_no_tile_spills_or_exceeds_the_chip(arithmetic):
    table = resources(CAPABILITIES, KERNELS, [arithmetic], HEAD_SIZES)
    places = itertools.product(KERNELS, [arithmetic], HEAD_SIZES, CAPABILITIES)
    assert len(table) == sum(len(shipped(*place)) for place in places)
    assert (table.registers <= 255).all()
    assert (table.shared_bytes <= table.shared_limit).all()
    portable = table[table.capability != 90]
    assert (portable.shared_bytes <= SMALLEST_SHARED_MEMORY).all(), portable.to_string()
    spilling = table[(table.spilled_bytes > 0) & ~table.apply(spills_and_may, axis=1)]
    assert spilling.empty, spilling.to_string()


def test_hoppers_own_kernels_fit_too():
    """At 128 the backward keeps a few addresses in memory while its loops run; those store nothing there."""
    table = resources([90], HOPPERS_OWN, ["half"], [64, 128])
    few = table["kernel"].eq("hopper_backward") & table["d_head"].eq(128)
    assert (table.spilled_bytes <= few * 96).all(), table.to_string()
    assert (table.registers <= 255).all()
    assert (table.shared_bytes <= table.shared_limit).all()


def test_a_tile_that_does_not_compile_is_an_error():
    with pytest.raises(RuntimeError, match="compiling ahead of time failed"):
        resources([80], ["forward"], ["half"], [500])


def test_lines_come_in_the_order_asked_for():
    table = resources([90], ["forward"], ["tf32", "half"], [64, 32])
    wanted = [("tf32", 64), ("tf32", 32), ("half", 64), ("half", 32)]
    assert list(zip(table.arithmetic, table.d_head, strict=True)) == wanted


def test_a_line_for_each_of_several_tiles():
    table = resources([90], ["dkdv"], ["exact"], [64])
    assert list(zip(table.block_n, table.case.fillna(""), strict=True)) == [
        (128, "reloads"),
        (32, ""),
        (16, ""),
    ]
