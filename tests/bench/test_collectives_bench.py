"""Rows of real collectives."""

import bench_workers
import pytest

from cs336_systems.accounting import bus_factor
from cs336_systems.accounting.collective_costs import COLLECTIVES
from cs336_systems.bench import benchmark_collectives
from cs336_systems.parallel import launch, stream
from labbook import save_rows


def test_rows_over_gloo():
    """Three ranks: a size that no whole number of elements divides; and a warning would be an error."""
    options = {"message_mb": (0.1, 1), "warmup_steps": 1, "steps": 3}
    batches = list(stream(bench_workers.time_collectives_strictly, 3, backend="gloo", **options))
    rows = [row for (row,) in batches]  # one at a time
    keys = [(size, collective) for size in (0.1, 1) for collective in COLLECTIVES]
    assert [(row["message_mb"], row["collective"]) for row in rows] == keys
    for row in rows:
        assert (row["world_size"], row["backend"], row["dtype"], row["steps"]) == (3, "gloo", "float32", 3)
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        ratio = row["bus_bandwidth_gbps"] / row["algorithm_bandwidth_gbps"]
        assert ratio == pytest.approx(bus_factor(row["collective"], 3))
        message_bytes = row["algorithm_bandwidth_gbps"] * 1e9 * row["p50_ms"] / 1e3
        assert message_bytes == pytest.approx(row["message_mb"] * 2**20, abs=12)


def test_a_row_ends_in_its_time():
    """What does not fit is left out, but one step is measured; and the rows can be saved."""
    options = {"collectives": ["all_reduce"], "message_mb": (4, 8), "limit_s": 1e-6}
    rows = [row for rows in benchmark_collectives(2, backend="gloo", **options) for row in rows]
    assert [(row["steps"], row["warmup_steps"]) for row in rows] == [(1, 5), (1, 5)]
    save_rows(rows, "distributed_communication_single_node", "collective_times", machine="somewhere")


def test_an_unknown_collective_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="gossip"):
        next(benchmark_collectives(2, backend="gloo", collectives=["gossip"]))


@pytest.mark.gpu(2)
def test_rows_over_nccl():
    sizes = (0.01, 1, 100)
    rows = [row for (row,) in benchmark_collectives(2, backend="nccl", message_mb=sizes, steps=3)]
    assert {row["backend"] for row in rows} == {"nccl"}
    for small, large in zip(rows, rows[2 * len(COLLECTIVES) :], strict=False):
        assert 0 < small["p50_ms"] < large["p50_ms"], small["collective"]
    # 0 would mean that the clock stopped when the kernels were launched, not when they were done.
    assert all(row["bus_bandwidth_gbps"] < 1000 for row in rows)


def test_a_step_is_timed_on_the_slowest_rank_and_shared_by_its_calls():
    first, second = launch(bench_workers.time_naps, 2, backend="gloo")
    assert first == second
    assert len(first) == 2
    assert all(20 <= ms < 50 for ms in first), first
