"""Every configuration in the tuning table, compiled for three generations of GPU without having one."""

import itertools
from importlib.metadata import version

import pytest

from cs336_systems.attention.config import HOPPERS_OWN, KERNELS

pytest.importorskip("triton")
from cs336_systems.attention.compile_resources import ARITHMETICS, resources, shipped

CAPABILITIES = (80, 90, 100)
HEAD_SIZES = (16, 32, 64, 128, 256)
SMALLEST_SHARED_MEMORY = 101_376


def spills_and_may(line) -> bool:
    """Ten words with Triton 3.6, and none with 3.7."""
    place = line.kernel, line.arithmetic, line.d_head, line.capability, line.block_n
    return place == ("dkdv", "exact", 64, 90, 32) and line.spilled_bytes <= 40 * (version("triton") < "3.7")


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
    table = resources([90], HOPPERS_OWN, ["half"], [64, 128])
    assert (table.spilled_bytes == 0).all(), table.to_string()
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
    assert list(table.block_n) == [32, 16]
