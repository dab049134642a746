"""The table of machines: plausible numbers, the handout's first."""

import math

import pytest

from cs336_systems.accounting.data_sheets import machines


@pytest.mark.parametrize("machine", machines().values(), ids=machines())
def test_a_machine_is_plausible_and_has_a_source(machine):
    assert 1e14 < machine.flops_per_s < 1e16
    assert 1e10 < machine.memory_bytes < 1e12
    assert machine.memory_bytes_per_s > machine.inside_bytes_per_s > 0
    assert (
        math.isnan(machine.between_bytes_per_s)
        or machine.between_bytes_per_s < machine.inside_bytes_per_s
    )
    assert machine.axes in (1, 2, 3)
    assert machine.inside_devices >= 8
