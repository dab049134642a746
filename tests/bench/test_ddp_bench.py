"""The benchmark of the wrappers, at its smallest."""

import pytest
import torch

from cs336_systems.bench.ddp_bench import LADDER, benchmark_ddp
from cs336_systems.measure.rows import load_rows
from cs336_systems.parallel import WorkerContext, launch


def test_rows_of_every_wrapper(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    options = {
        "context_length": 8,
        "batch_sizes": [2, 4],
        "dtypes": ["bfloat16"],
        "bucket_sizes_mb": (0.1, 100),
        "warmup_steps": 1,
        "steps": 2,
    }
    every_rank = launch(benchmark_ddp, 2, backend="gloo", machine="somewhere", **options)
    rows = every_rank[0]
    assert [row.keys() for row in rows] == [row.keys() for row in every_rank[1]]
    assert [(row["batch_size"], row["implementation"], row["bucket_size_mb"]) for row in rows] == [
        (batch_size, *variant)
        for batch_size in (2, 4)
        for variant in (
            ("naive", None),
            ("flat", None),
            ("overlapped", None),
            ("bucketed", 0.1),
            ("bucketed", 100),
            ("torch", 0.1),
            ("torch", 100),
        )
    ]
    expected = {"model_size": "tiny", "edition": 2025, "attention": "reference", "pass": "train_step"}
    expected |= {"world_size": 2, "backend": "gloo", "dtype": "bfloat16", "status": "ok", "steps": 2}
    for row, of_rank_1 in zip(*every_rank, strict=True):
        assert expected.items() <= row.items()
        assert row["p50_ms"] == of_rank_1["p50_ms"]  # the slowest rank's times, on all
        assert row["exposed_communication_ms"] == row["p50_ms"] - row["alone_ms"]
        assert ("communication_ms" in row) == (row["implementation"] != "torch")
    saved = load_rows(LADDER, "somewhere")
    assert sorted(saved["p50_ms"]) == pytest.approx(sorted(row["p50_ms"] for row in rows), rel=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows)
    assert lines[3].startswith("[rank 0] bucketed with buckets of 0.1 MB, bfloat16, batch 2: ")


def test_one_process_alone():
    (row,) = launch(
        benchmark_ddp,
        1,
        backend="gloo",
        implementations=["single"],
        context_length=8,
        warmup_steps=0,
        steps=1,
    )[0]
    assert (row["implementation"], row["world_size"], row["status"]) == ("single", 1, "ok")
    assert row["p50_ms"] > 0
    assert "alone_ms" not in row


@pytest.mark.gpu(2)
def test_rows_over_nccl_and_their_memory():
    """Each wrapper starts from an empty GPU: what the one before held is given back."""
    options = {"model_size": "small", "dtypes": ["bfloat16"], "bucket_sizes_mb": [25], "profile": True}
    names = ["naive", "flat", "overlapped", "bucketed", "torch", "naive"]
    rows = launch(benchmark_ddp, 2, backend="nccl", implementations=names, steps=2, **options)[0]
    assert [row["status"] for row in rows] == ["ok"] * len(names)
    peaks = {name: row["peak_memory_mib"] for name, row in zip(names, rows, strict=True)}
    assert rows[-1]["peak_memory_mib"] == pytest.approx(rows[0]["peak_memory_mib"], rel=0.01)
    assert max(peaks.values()) < 1.5 * peaks["naive"]
    for row in rows:
        assert row["alone_ms"] > 0
        assert 0 <= row["profiled_exposed_ms"] <= row["profiled_communication_ms"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_sizes": [2, 3]}, "batch_size 3 cannot be shared by 2"),
        ({"implementations": ["fast"]}, "naive, flat"),
        ({"dtypes": ["float8"]}, "float32"),
        ({"model_size": "gigantic"}, "tiny"),
        ({"implementations": ["single"]}, "one process; this is one of 2"),
    ],
)
def test_it_refuses_in_a_sentence(options, words):
    context = WorkerContext(rank=0, world_size=2, local_rank=0, device=torch.device("cpu"), backend="gloo")
    with pytest.raises(ValueError, match=words):
        benchmark_ddp(context, **options)
