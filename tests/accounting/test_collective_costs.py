"""Collectives: closed forms, and the line that is fitted to times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.accounting.collective_costs import fit_alpha_beta

SIZES = st.floats(1, 1e9)
TIMES = st.floats(1e-6, 1e2)


@given(st.dictionaries(SIZES, TIMES, min_size=2, max_size=6))
def test_no_other_line_has_smaller_relative_errors(times_of):
    sizes = list(times_of)
    times = list(times_of.values())
    fit = fit_alpha_beta(sizes, times)

    def error(latency, per_byte):
        line = ((latency + size * per_byte) / time for size, time in times_of.items())
        return sum((ratio - 1) ** 2 for ratio in line)

    best = error(fit.latency_s, fit.seconds_per_byte)
    squares = sum(residual**2 for residual in fit.residuals)
    assert min(fit.latency_s, fit.seconds_per_byte) >= 0
    assert squares == pytest.approx(best, rel=1e-6, abs=1e-9)
    for latency in (0, 0.9, 1.1):
        for per_byte in (0, 0.9, 1.1):
            other = error(latency * fit.latency_s, per_byte * fit.seconds_per_byte)
            assert best <= other * (1 + 1e-6) + 1e-9


def test_fits_on_the_borders():
    superlinear = fit_alpha_beta([1e6, 1e7], [1e-4, 2e-3])  # the straight line starts below zero
    assert superlinear.latency_s == superlinear.half_bandwidth_bytes == 0
    falling = fit_alpha_beta([1e6, 1e7], [2e-3, 1e-3])
    assert falling.bandwidth_gbps == falling.half_bandwidth_bytes == float("inf")
