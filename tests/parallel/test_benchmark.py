"""The benchmark of the wrappers, at its smallest."""

import pytest
import torch

from cs336_systems.measure.rows import load_rows, save_rows
from cs336_systems.parallel import WorkerContext, launch
from cs336_systems.parallel.benchmark import benchmark_ddp


def test_rows_of_every_wrapper(tmp_path, monkeypatch):
    options = {
        "context_length": 8,
        "batch_size": 2,
        "bucket_sizes_mb": (0.1, 100),
        "warmup_steps": 1,
        "steps": 2,
    }
    every_rank = launch(benchmark_ddp, 2, backend="gloo", dtype="bfloat16", **options)
    rows = every_rank[0]
    assert rows == every_rank[1]
    assert [(row["implementation"], row["bucket_size_mb"]) for row in rows] == [
        ("naive", None),
        ("flat", None),
        ("overlapped", None),
        ("bucketed", 0.1),
        ("bucketed", 100),
        ("torch", 0.1),
        ("torch", 100),
    ]
    expected = {"model_size": "tiny", "edition": 2025, "batch_size": 2, "pass": "train_step"}
    expected |= {"world_size": 2, "backend": "gloo", "dtype": "bfloat16", "status": "ok"}
    for row in rows:
        assert expected.items() <= row.items()
        assert row["exposed_communication_ms"] == row["p50_ms"] - row["alone_ms"]
        assert (row["communication_ms"] is None) == (row["implementation"] == "torch")
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    save_rows(rows, "ddp", machine="somewhere")
    assert len(load_rows("ddp", "somewhere")) == len(rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 3}, "batch_size 3 cannot be shared by 2"),
        ({"implementations": ["fast"]}, "naive, flat"),
        ({"dtype": "float8"}, "float32"),
        ({"model_size": "gigantic"}, "tiny"),
    ],
)
def test_it_refuses_in_a_sentence(options, words):
    context = WorkerContext(rank=0, world_size=2, local_rank=0, device=torch.device("cpu"), backend="gloo")
    with pytest.raises(ValueError, match=words):
        benchmark_ddp(context, **options)
