"""The table of machines: plausible numbers, the handout's first."""

import math

import pytest

from cs336_systems.accounting.data_sheets import hardware, hardware_names


@pytest.mark.parametrize("name", hardware_names())
def test_a_machine_is_plausible_and_has_a_source(name):
    machine = hardware(name)
    assert 1e14 < machine.flops_per_s < 1e16
    assert 1e10 < machine.memory_bytes < 1e12
    assert machine.memory_bytes_per_s > machine.inside_bytes_per_s > 0
    assert math.isnan(machine.between_bytes_per_s) or machine.between_bytes_per_s < machine.inside_bytes_per_s
    assert machine.axes in (1, 2, 3)
    assert machine.inside_devices >= 8


def test_the_first_is_the_handouts():
    machine = hardware(hardware_names()[0])
    assert (machine.flops_per_s, machine.axis_bytes_per_s, machine.memory_bytes) == (4.6e14, 1.8e11, 95e9)


@pytest.mark.parametrize(("name", "gbps"), [("A100 80GB SXM", 200), ("H100 SXM", 400), ("TPU v5p", 56_000)])
def test_a_host_sends_over_the_links_of_all_its_devices(name, gbps):
    assert hardware(name).host_bytes_per_s == 1e9 * gbps
