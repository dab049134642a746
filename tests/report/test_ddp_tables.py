"""Choosing among the rows of data-parallel training, and what scaling compares."""

import pandas as pd
import pytest

from cs336_systems.report import ddp_tables
from cs336_systems.report.ddp_tables import fastest, fit_collective, of_run, on_gpus, stages, strong_and_weak

SAME = {"edition": 2025, "model_size": "xl", "context_length": 512, "dtype": "float32", "backend": "nccl"}
SAME |= {"status": "ok", "attention": "plain", "world_size": 2, "batch_size": 4, "bucket_size_mb": None}


@pytest.fixture
def rows() -> pd.DataFrame:
    alone = [
        {"implementation": "single", "p50_ms": ms, "world_size": 1, "batch_size": n}
        for n, ms in ((1, 100.0), (2, 180.0), (4, 340.0))
    ]
    naive = [{"p50_ms": 240.0}, {"p50_ms": 1.0, "attention": "flash_triton"}]
    bucketed = [
        {"p50_ms": 210.0, "bucket_size_mb": 1.0},
        {"p50_ms": 200.0},
        {"p50_ms": 5.0, "backend": "gloo"},
        {"p50_ms": None, "status": "oom"},
        {"p50_ms": 125.0, "world_size": 4},
        {"p50_ms": 225.0, "world_size": 4, "batch_size": 8},
    ]
    naive = [{"implementation": "naive"} | row for row in naive]
    bucketed = [{"implementation": "bucketed", "bucket_size_mb": 100.0} | row for row in bucketed]
    return pd.DataFrame([SAME | row for row in (*alone, *naive, *bucketed)])


def test_on_gpus_keeps_one_setting_and_the_fastest_bucket(rows):
    kept = on_gpus(rows)
    assert kept["p50_ms"].tolist() == [240.0, 210.0, 200.0]
    assert set(kept["model"]) == {"xl (2025)"}
    assert fastest(kept).set_index("wrapper")["p50_ms"].to_dict() == {"naive": 240.0, "bucketed": 200.0}
    found = of_run(rows, world_size=2, backend=["nccl"], attention="plain", bucket_size_mb=[100.0, 1000.0])
    assert found["wrapper"].tolist() == ["naive", "bucketed", "bucketed"]
    wrappers = ddp_tables.with_wrapper(pd.DataFrame({"implementation": ["single", "torch"]}))["wrapper"]
    assert wrappers.tolist() == ["one process", "PyTorch's DDP"]


def test_scaling_compares_with_one_process_on_the_share_and_on_the_whole(rows):
    found = strong_and_weak(rows, "bucketed").set_index(["scaling", "GPUs"])
    assert found["efficiency"].to_dict() == pytest.approx(
        {("strong", 2): 340 / 400, ("strong", 4): 340 / 500, ("weak", 2): 180 / 200, ("weak", 4): 180 / 225}
    )
    assert found["bucket_size_mb"].unique() == [100]
    assert strong_and_weak(rows.iloc[:0], "bucketed").empty
    assert fastest(on_gpus(rows.iloc[:0])).empty


def test_stages_of_a_step():
    spans = [
        *[("compute", "forward", 0.0, 4.0), ("compute", "backward", 4.0, 7.0)],
        *[("compute", "backward", 8.0, 10.0), ("communication", "backward", 6.0, 7.5)],
        ("communication", "communication", 9.5, 13.0),
    ]
    lanes = pd.DataFrame(spans, columns=["lane", "range", "start_ms", "end_ms"])
    lanes = lanes.assign(dtype="float32", wrapper="overlapped", bucket_size_mb=None)
    found = stages(lanes)[["backward_ms", "busy_share", "communication_ms", "tail_ms"]]
    assert found.to_numpy().tolist() == [pytest.approx([6, 5 / 6, 5, 3])]
    assert stages(lanes.iloc[:0]).empty


def test_the_fit_takes_the_rows_asked_for():
    same = {"collective": "all_reduce", "world_size": 2, "backend": "nccl", "status": "ok"}
    rows = [same | {"message_mb": 10, "p50_ms": 2.0}, same | {"message_mb": 1, "p50_ms": 1.1}]
    for other in ({"backend": "gloo"}, {"world_size": 4}, {"collective": "broadcast"}):
        rows += [same | {"message_mb": 3, "p50_ms": 7.0} | other]
    fit = fit_collective(pd.DataFrame([*rows, same | {"message_mb": 5, "p50_ms": None, "status": "error"}]))
    assert (fit.latency_s, fit.seconds_per_byte) == pytest.approx((1e-3, 1e-4 / 2**20))
