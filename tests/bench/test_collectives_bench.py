"""Collectives: closed forms, the fit, and rows from real ones over Gloo."""

import importlib

import launch_workers
import pandas as pd
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.bench import collectives_bench as collectives
from cs336_systems.bench.collectives_bench import (
    COLLECTIVES,
    algorithm_bandwidth_gbps,
    bus_bandwidth_gbps,
    bus_factor,
    fit_alpha_beta,
    fit_rows,
    ring_seconds,
)
from cs336_systems.measure.rows import load_rows
from cs336_systems.parallel import launch

RANKS = st.integers(2, 64)
BYTES = st.floats(1, 1e12)


def test_bus_factors_are_those_of_nccl_tests():
    assert [bus_factor("all_reduce", n) for n in (1, 2, 4)] == [0, 1, 1.5]
    assert [bus_factor("all_gather", n) for n in (1, 2, 4)] == [0, 0.5, 0.75]
    assert [bus_factor("reduce_scatter", n) for n in (1, 2, 4)] == [0, 0.5, 0.75]
    assert [bus_factor("broadcast", n) for n in (1, 2, 4)] == [1, 1, 1]


def test_bandwidths():
    assert algorithm_bandwidth_gbps(2e9, 0.5) == 4
    assert bus_bandwidth_gbps("all_reduce", 2e9, 0.5, 4) == 6


@pytest.mark.parametrize(
    ("arguments", "words"), [(("reduce", 2), "allowed: all_reduce"), (("broadcast", 0), "1 or")]
)
def test_bus_factor_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        bus_factor(*arguments)


@given(RANKS, BYTES, st.floats(0, 1), st.floats(1e3, 1e12))
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(n, size, hop, rate):
    reduce, scatter, gather = (
        ring_seconds(collective, size, n, hop_s=hop, link_bytes_per_s=rate)
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert reduce == pytest.approx(scatter + gather)


@given(RANKS, BYTES, st.floats(1e3, 1e12), st.sampled_from(COLLECTIVES))
def test_without_latency_the_bus_bandwidth_is_the_links_rate(n, size, rate, collective):
    seconds = ring_seconds(collective, size, n, hop_s=0, link_bytes_per_s=rate)
    assert bus_bandwidth_gbps(collective, size, seconds, n) == pytest.approx(rate / 1e9)


@given(st.floats(1e-7, 1e-2), st.floats(1e-13, 1e-7), st.lists(BYTES, min_size=2, max_size=8, unique=True))
def test_the_fit_finds_the_line_it_was_given(latency, per_byte, sizes):
    times = [latency + size * per_byte for size in sizes]
    fit = fit_alpha_beta(sizes, times)
    assert fit.latency_s >= 0
    assert fit.seconds_per_byte >= 0
    assert [fit.seconds(size) for size in sizes] == pytest.approx(times, rel=1e-5)
    assert fit.residuals == pytest.approx([0] * len(sizes), abs=1e-5)


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
    assert sum(residual**2 for residual in fit.residuals) == pytest.approx(best, rel=1e-6, abs=1e-9)
    for latency in (0, 0.9, 1.1):
        for per_byte in (0, 0.9, 1.1):
            other = error(latency * fit.latency_s, per_byte * fit.seconds_per_byte)
            assert best <= other * (1 + 1e-6) + 1e-9


def test_a_negative_latency_becomes_zero():
    fit = fit_alpha_beta([1e6, 1e7], [1e-4, 2e-3])  # superlinear: the straight line starts below zero
    assert fit.latency_s == 0
    assert fit.half_bandwidth_bytes == 0
    assert fit.bandwidth_gbps > 0


def test_times_that_fall_with_size_have_no_bandwidth():
    fit = fit_alpha_beta([1e6, 1e7], [2e-3, 1e-3])
    assert fit.seconds_per_byte == 0
    assert fit.bandwidth_gbps == fit.half_bandwidth_bytes == float("inf")


@pytest.mark.parametrize(
    ("sizes", "times"),
    [([1], [1]), ([1, 1], [1, 2]), ([1, 2], [1]), ([0, 2], [1, 2]), ([1, 2], [1, float("nan")])],
)
def test_the_fit_refuses_what_it_cannot_fit(sizes, times):
    with pytest.raises(ValueError, match="two or more different sizes"):
        fit_alpha_beta(sizes, times)


def test_rows_over_gloo():
    """Three ranks: a size that no whole number of elements divides; and a warning would be an error."""
    every_rank = launch(
        launch_workers.time_collectives_strictly, 3, backend="gloo", message_mb=(0.1, 1), steps=3
    )
    assert every_rank[0] == every_rank[1] == every_rank[2]  # the slowest rank's times, on all
    assert [(row["case"], row["message_mb"]) for row in every_rank[0]] == [
        (collective, size) for size in (0.1, 1) for collective in COLLECTIVES
    ]
    for row in every_rank[0]:
        assert (row["world_size"], row["backend"], row["dtype"], row["steps"]) == (3, "gloo", "float32", 3)
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        ratio = row["bus_bandwidth_gbps"] / row["algorithm_bandwidth_gbps"]
        assert ratio == pytest.approx(bus_factor(row["case"], 3))
        message_bytes = row["algorithm_bandwidth_gbps"] * 1e9 * row["p50_ms"] / 1e3
        assert message_bytes == pytest.approx(row["message_mb"] * 2**20, abs=12)


@pytest.mark.gpu(2)
def test_rows_over_nccl():
    sizes = (0.01, 1, 100)
    rows = launch(launch_workers.time_collectives_strictly, 2, backend="nccl", message_mb=sizes, steps=3)[0]
    assert [(row["message_mb"], row["case"], row["backend"]) for row in rows] == [
        (size, collective, "nccl") for size in sizes for collective in COLLECTIVES
    ]
    for small, large in zip(rows, rows[2 * len(COLLECTIVES) :], strict=False):
        assert 0 < small["p50_ms"] < large["p50_ms"], small["case"]
    # 0 would mean that the clock stopped when the kernels were launched, not when they were done.
    assert all(row["bus_bandwidth_gbps"] < 1000 for row in rows)


def test_a_step_is_timed_on_the_slowest_rank_and_shared_by_its_calls():
    first, second = launch(launch_workers.time_naps, 2, backend="gloo")
    assert first == second
    assert len(first) == 2
    assert all(20 <= ms < 50 for ms in first), first


def test_a_row_ends_in_its_time(tmp_path, monkeypatch, capsys):
    """Rows are saved as they come; what does not fit is left out, but one step is measured."""
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    options = {"collectives": ["all_reduce"], "message_mb": (4, 8), "limit_s": 1e-6, "machine": "somewhere"}
    rows = launch(collectives.time_collectives, 2, backend="gloo", **options)[0]
    assert [(row["steps"], row["warmup_steps"]) for row in rows] == [(1, 5), (1, 5)]
    saved = load_rows(collectives.SLUG, "somewhere")
    assert saved["p50_ms"].tolist() == pytest.approx([row["p50_ms"] for row in rows], rel=1e-5)
    assert "[rank 0] gloo, 2 ranks, all_reduce of 4 MB: " in capsys.readouterr().out


def test_the_fit_of_rows_takes_those_asked_for():
    def row(size_mb, p50_ms, **others):
        same = {"case": "all_reduce", "world_size": 2, "backend": "nccl", "status": "ok"}
        return same | {"message_mb": size_mb, "p50_ms": p50_ms} | others

    rows = [row(10, 2.0), row(1, 1.1), row(1, 7.0, backend="gloo"), row(2, 7.0, world_size=4)]
    fit = fit_rows(pd.DataFrame([*rows, row(3, 7.0, case="broadcast"), row(5, None, status="error")]))
    assert fit.latency_s == pytest.approx(1e-3)
    assert fit.seconds_per_byte == pytest.approx(1e-4 / 2**20)


def test_torch_before_2_13_has_other_names(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(dist, "all_gather_single", raising=False)
        patch.delattr(dist, "reduce_scatter_single", raising=False)
        older = importlib.reload(collectives)
        assert older._all_gather is dist.all_gather_into_tensor
        assert older._reduce_scatter is dist.reduce_scatter_tensor
    importlib.reload(collectives)
