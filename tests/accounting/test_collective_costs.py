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
)

RANKS = st.integers(2, 64)
BYTES = st.floats(1, 1e12)


def test_bus_factors_are_those_of_nccl_tests():
    assert [bus_factor("all_reduce", n) for n in (1, 2, 4)] == [0, 1, 1.5]
    assert [bus_factor("all_gather", n) for n in (1, 2, 4)] == [0, 0.5, 0.75]
    assert [bus_factor("reduce_scatter", n) for n in (1, 2, 4)] == [0, 0.5, 0.75]
    assert [bus_factor("all_to_all", n) for n in (1, 2, 4)] == [0, 0.5, 0.75]
    assert [bus_factor("broadcast", n) for n in (1, 2, 4)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bus_factor("reduce", 2), "all_reduce"),
        (lambda: ring_seconds("all_reduce", 1.0, 2, hop_s=0, link_bytes_per_s=-1), "link_bytes_per_s is -1"),
        (lambda: fit_alpha_beta([1, 1], [1, 2]), "two or more different sizes"),
        (lambda: fit_alpha_beta([0, 2], [1, float("nan")]), "finite and above 0"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(RANKS, BYTES, st.floats(0, 1), st.floats(1e3, 1e12))
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(n, size, hop, rate):
    reduce, scatter, gather = (
        ring_seconds(collective, size, n, hop_s=hop, link_bytes_per_s=rate)
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert reduce == pytest.approx(scatter + gather)
    assert gather == pytest.approx((n - 1) * (hop + size / n / rate))


@given(
    st.lists(
        st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e2)), min_size=2, max_size=6, unique_by=lambda p: p[0]
    )
)
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
