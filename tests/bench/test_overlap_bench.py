"""Profiles of real steps: what the wrappers hide, and the tables that keep it."""

import lanes_workers
import pytest

from cs336_systems.bench.overlap_bench import PROFILES
from cs336_systems.measure.overlap import overlap
from cs336_systems.measure.rows import load_rows
from cs336_systems.parallel import launch


def test_every_rank_gets_the_numbers_of_the_most_exposed_and_the_tables_are_saved():
    first, second = launch(lanes_workers.save, 2, "somewhere", backend="gloo", timeout_s=60)
    assert first == second
    profiles = load_rows(PROFILES, "somewhere", table="profiles")
    assert profiles["rank"].tolist() == [0, 1]
    assert profiles["profiled_exposed_ms"].max() == pytest.approx(first["profiled_exposed_ms"], rel=1e-5)
    assert (profiles["profiled_exposed_ms"] <= profiles["profiled_communication_ms"] + 1e-9).all()
    timeline = load_rows(PROFILES, "somewhere", table="timeline")
    assert set(timeline["lane"]) == {"compute", "communication"}
    assert {"forward", "backward"} <= set(timeline["range"])
    assert (timeline["start_ms"] <= timeline["end_ms"]).all()


def test_the_lanes_of_naive_communication_lie_behind_backward():
    for lanes in launch(lanes_workers.lanes, 2, "naive", backend="gloo", timeout_s=60):
        messages = lanes[lanes["lane"] == "communication"]
        computed = lanes[(lanes["lane"] == "compute") & (lanes["range"] == "backward")]
        assert set(messages["range"]) == {"communication"}
        assert messages["start_ms"].min() >= computed["start_ms"].max()


@pytest.mark.gpu(2)
def test_on_gpus_naive_exposes_what_overlapped_hides():
    shape = {
        "layers": 24,
        "width": 4096,
        "batch": 8192,
    }  # 64 MiB each: computed in 10 ms, sent in less than 1 ms
    found = {
        name: overlap(launch(lanes_workers.lanes, 2, name, backend="nccl", timeout_s=120, **shape)[0])
        for name in ("naive", "overlapped")
    }
    assert found["naive"]["overlap_share"] < 0.1
    assert found["overlapped"]["overlap_share"] > 0.8
    assert found["overlapped"]["profiled_exposed_ms"] < 0.3 * found["naive"]["profiled_exposed_ms"]
