"""Choosing among the rows of data-parallel training, and what scaling compares."""

import pandas as pd
import pytest

from cs336_systems.report.ddp_tables import (
    fastest,
    fit_collective,
    of_run,
    on_gpus,
    stages,
    strong_and_weak,
    with_model,
    with_wrapper,
)  # fmt: skip


def row(implementation, p50_ms, world_size=2, batch_size=4, bucket=None, **other):
    same = {"edition": 2025, "model_size": "xl", "context_length": 512, "dtype": "float32"}
    same |= {"backend": "nccl", "status": "ok", "attention": "plain"}
    mine = {"implementation": implementation, "p50_ms": p50_ms, "world_size": world_size}
    return same | mine | {"batch_size": batch_size, "bucket_size_mb": bucket} | other


@pytest.fixture
def rows() -> pd.DataFrame:
    return pd.DataFrame(
        [
            row("single", 100.0, world_size=1, batch_size=1),
            row("single", 180.0, world_size=1, batch_size=2),
            row("single", 340.0, world_size=1, batch_size=4),
            row("naive", 240.0),
            row("bucketed", 210.0, bucket=1.0),
            row("bucketed", 200.0, bucket=100.0),
            row("bucketed", 5.0, bucket=10.0, backend="gloo"),
            row("bucketed", None, bucket=1000.0, status="oom"),
            row("naive", 1.0, attention="flash_triton"),
            row("bucketed", 125.0, world_size=4, bucket=100.0),
            row("bucketed", 225.0, world_size=4, batch_size=8, bucket=100.0),
        ]
    )


def test_on_gpus_keeps_one_setting_and_the_fastest_bucket(rows):
    kept = on_gpus(rows)
    assert kept["p50_ms"].tolist() == [240.0, 210.0, 200.0]
    assert set(kept["model"]) == {"xl (2025)"}
    best = fastest(kept).set_index("wrapper")["p50_ms"]
    assert best.to_dict() == {"naive": 240.0, "bucketed": 200.0}


def test_scaling_compares_with_one_process_on_the_share_and_on_the_whole(rows):
    found = strong_and_weak(rows, "bucketed").set_index(["scaling", "GPUs"])
    assert found["efficiency"].to_dict() == pytest.approx(
        {("strong", 2): 340 / 400, ("strong", 4): 340 / 500, ("weak", 2): 180 / 200, ("weak", 4): 180 / 225}
    )
    assert found["bucket_size_mb"].unique() == [100]


def test_nothing_measured_is_an_empty_frame(rows):
    assert strong_and_weak(rows.iloc[:0], "bucketed").empty
    assert fastest(on_gpus(rows.iloc[:0])).empty


def test_stages_of_a_step():
    spans = [
        ("compute", "forward", 0.0, 4.0),
        ("compute", "backward", 4.0, 7.0),
        ("compute", "backward", 8.0, 10.0),
        ("communication", "backward", 6.0, 7.5),
        ("communication", "communication", 9.5, 13.0),
    ]
    lanes = pd.DataFrame(spans, columns=["lane", "range", "start_ms", "end_ms"])
    lanes = lanes.assign(dtype="float32", wrapper="overlapped", bucket_size_mb=None)
    (found,) = stages(lanes).to_dict("records")
    assert found["backward_ms"] == 6
    assert found["busy_share"] == pytest.approx(5 / 6)
    assert found["communication_ms"] == 5
    assert found["tail_ms"] == 3
    assert stages(lanes.iloc[:0]).empty


def test_of_run_keeps_what_was_asked_for_and_wrappers_without_buckets(rows):
    found = of_run(rows, world_size=2, backend=["nccl"], attention="plain", bucket_size_mb=[100.0, 1000.0])
    assert found["wrapper"].tolist() == ["naive", "bucketed", "bucketed"]
    assert found["p50_ms"].dropna().tolist() == [240.0, 200.0]


def test_the_fit_takes_the_rows_asked_for():
    def row(size_mb, p50_ms, **others):
        same = {"collective": "all_reduce", "world_size": 2, "backend": "nccl", "status": "ok"}
        return same | {"message_mb": size_mb, "p50_ms": p50_ms} | others

    rows = [row(10, 2.0), row(1, 1.1), row(1, 7.0, backend="gloo"), row(2, 7.0, world_size=4)]
    fit = fit_collective(
        pd.DataFrame([*rows, row(3, 7.0, collective="broadcast"), row(5, None, status="error")])
    )
    assert fit.latency_s == pytest.approx(1e-3)
    assert fit.seconds_per_byte == pytest.approx(1e-4 / 2**20)


def test_models_and_wrappers_have_labels():
    frame = pd.DataFrame({"model_size": ["xl", "xl"], "edition": [2025, 2026]})
    assert list(with_model(frame)["model"]) == ["xl (2025)", "xl (2026)"]
    frame = pd.DataFrame({"implementation": ["single", "naive", "torch"]})
    assert list(with_wrapper(frame)["wrapper"]) == ["one process", "naive", "PyTorch's DDP"]
