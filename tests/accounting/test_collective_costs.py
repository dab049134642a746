"""Collectives: closed forms, and the line that is fitted to times."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.accounting.collective_costs import (
    bus_factor,
    fit_alpha_beta,
    ring_seconds,
    torch_bucket_bytes,
)  # fmt: skip

RANKS = st.integers(2, 64)
BYTES = st.floats(1, 1e12)


def test_bus_factors_are_those_of_nccl_tests():
    per_ranks = {name: [0, 0.5, 0.75] for name in ("all_gather", "reduce_scatter", "all_to_all")}
    per_ranks |= {"all_reduce": [0, 1, 1.5], "broadcast": [1, 1, 1]}
    assert {name: [bus_factor(name, n) for n in (1, 2, 4)] for name in per_ranks} == per_ranks


@given(RANKS, BYTES, st.floats(0, 1), st.floats(1e3, 1e12))
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(n, size, hop, rate):
    reduce, scatter, gather = (
        ring_seconds(collective, size, n, hop_s=hop, link_bytes_per_s=rate)
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert reduce == pytest.approx(scatter + gather)
    assert gather == pytest.approx((n - 1) * (hop + size / n / rate))


points = st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e2))


@given(st.lists(points, min_size=2, max_size=6, unique_by=lambda point: point[0]))
def test_no_other_line_has_smaller_relative_errors(points):
    sizes, times = zip(*points, strict=True)
    fit = fit_alpha_beta(sizes, times)

    def error(latency, per_byte):
        return sum(((latency + size * per_byte) / time - 1) ** 2 for size, time in points)

    best = error(fit.latency_s, fit.seconds_per_byte)
    assert min(fit.latency_s, fit.seconds_per_byte) >= 0
    assert sum(residual**2 for residual in fit.residuals) == pytest.approx(best, rel=1e-6, abs=1e-9)
    for latency in (0, 0.9, 1.1):
        for per_byte in (0, 0.9, 1.1):
            other = error(latency * fit.latency_s, per_byte * fit.seconds_per_byte)
            assert best <= other * (1 + 1e-6) + 1e-9


def test_fits_on_a_line_and_on_the_borders():
    fit = fit_alpha_beta([1e6, 1e7, 1e8], [2e-3, 11e-3, 101e-3])
    assert fit.latency_s == pytest.approx(1e-3)
    assert fit.half_bandwidth_bytes == pytest.approx(1e7 / 10)
    assert fit.bandwidth_gbps == pytest.approx(1)
    assert fit.seconds(5e6) == pytest.approx(6e-3)
    superlinear = fit_alpha_beta([1e6, 1e7], [1e-4, 2e-3])  # the straight line starts below zero
    assert superlinear.latency_s == superlinear.half_bandwidth_bytes == 0
    falling = fit_alpha_beta([1e6, 1e7], [2e-3, 1e-3])
    assert falling.bandwidth_gbps == falling.half_bandwidth_bytes == float("inf")


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 400).map(lambda size: size / 2**20))
def test_pytorchs_buckets_are_those_that_pytorch_fills(numbers, bucket_size_mb):
    parameters = [torch.empty(number, device="meta") for number in numbers]
    order = parameters[::-1]
    places = dist._compute_bucket_assignment_by_size(order, [int(bucket_size_mb * 2**20)])[0] if order else []
    expected = [sum(order[place].nbytes for place in bucket) for bucket in places]
    assert torch_bucket_bytes(parameters, bucket_size_mb) == expected
