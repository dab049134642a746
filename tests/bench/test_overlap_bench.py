"""Profiles of real steps: what the wrappers hide."""

import bench_workers
import pandas as pd
import pytest

from cs336_systems.measure import overlap_values
from cs336_systems.parallel import launch


def test_every_rank_gets_the_numbers_of_all():
    key = {"implementation": "overlapped"}
    first, second = launch(bench_workers.overlap_of_overlapped, 2, key, backend="gloo")
    assert first["ddp_overlap"] == second["ddp_overlap"]
    assert [row["rank"] for row in first["ddp_overlap"]] == [0, 1]
    assert all(row["profiled_communication_ms"] > 0 for row in first["ddp_overlap"])
    timeline = pd.DataFrame(first["ddp_timeline"])
    assert set(timeline["lane"]) == {"compute", "communication"}
    assert {"forward", "backward"} <= set(timeline["range"])
    assert not timeline.duplicated(["lane", "span"]).any()
    assert (timeline["start_ms"] <= timeline["end_ms"]).all()


def test_the_lanes_of_naive_communication_lie_behind_backward():
    for lanes in launch(bench_workers.lanes, 2, "naive", backend="gloo"):
        messages = lanes.query("lane == 'communication'")
        computed = lanes.query("lane == 'compute' and range == 'backward'")
        assert set(messages["range"]) == {"communication"}
        assert messages["start_ms"].min() >= computed["start_ms"].max()


@pytest.mark.gpu(2)
def test_on_gpus_naive_exposes_what_overlapped_hides():
    shape = {"layers": 24, "width": 4096, "batch": 8192}  # 64 MiB each: computed in 10 ms, sent in under 1 ms
    found = {
        name: overlap_values(launch(bench_workers.lanes, 2, name, backend="nccl", **shape)[0])
        for name in ("naive", "overlapped")
    }
    assert found["naive"]["overlap_share"] < 0.1
    assert found["overlapped"]["overlap_share"] > 0.8
    assert found["overlapped"]["profiled_exposed_ms"] < 0.3 * found["naive"]["profiled_exposed_ms"]
