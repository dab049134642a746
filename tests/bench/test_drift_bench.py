"""Data-parallel training beside one process: rows that say how far apart they are."""

import pytest

from cs336_systems.bench.drift_bench import compare_training
from cs336_systems.measure.rows import load_rows
from cs336_systems.parallel import WorkerError, launch


def test_every_wrapper_follows_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    names = ["naive", "flat", "overlapped", "bucketed", "torch"]
    options = {"implementations": names, "steps": 2, "slug": "naive_ddp", "machine": "somewhere"}
    first, second = launch(compare_training, 2, backend="gloo", **options)
    assert first == second
    saved = load_rows("naive_ddp", "somewhere")
    assert len(saved) == len(first) == len(names) * 2 * 2 * 2  # optimizers, steps, tensors
    assert set(saved["case"]) == {"SGD", "AdamW"}
    assert (saved[saved["tensor"] == "replicas"]["result"] == 0).all()
    weights = saved[saved["tensor"] == "weights"]
    assert weights[weights["case"] == "SGD"]["result"].max() < 1e-6
    # AdamW turns the rounding of a gradient near zero into a difference of up to its rate.
    assert weights[weights["case"] == "AdamW"]["result"].max() < 3e-3


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(WorkerError, match="batch_size 3 cannot be shared by 2 ranks"):
        launch(compare_training, 2, backend="gloo", batch_size=3)


@pytest.mark.gpu(2)
def test_over_nccl_too():
    rows = launch(compare_training, 2, backend="nccl", implementations=["naive", "bucketed"], steps=2)[0]
    assert {row["backend"] for row in rows} == {"nccl"}
    assert all(row["result"] == 0 for row in rows if row["tensor"] == "replicas")
    assert all(row["result"] < 1e-5 for row in rows if row["tensor"] == "weights" and row["case"] == "SGD")
