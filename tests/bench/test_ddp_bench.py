"""The benchmark of the wrappers, at its smallest."""

import pytest

from cs336_systems.bench import DDP_SLUGS, benchmark_ddp
from labbook import save_rows


def test_rows_of_every_wrapper_and_of_their_profiles():
    options = {"context_length": 8, "batch_sizes": [2], "dtypes": ["bfloat16"], "bucket_sizes_mb": (0.1, 100)}
    batches = list(benchmark_ddp(2, backend="gloo", warmup_steps=1, steps=2, profile=True, **options))
    for table, rows in batches:
        save_rows(rows, DDP_SLUGS[table], table, machine="somewhere")
    times = [row for table, rows in batches if table == "ddp_times" for row in rows]
    single_buckets = [("naive", None), ("flat", None), ("overlapped", None)]
    buckets = [(name, size) for name in ("bucketed", "torch") for size in (0.1, 100)]
    variants = [(row["implementation"], row["bucket_size_mb"]) for row in times]
    assert variants == [*single_buckets, *buckets]
    assert [table for table, _ in batches[:7]] == ["ddp_times"] * 7  # all are timed before any is profiled
    expected = {"model_size": "tiny", "edition": 2025, "attention": "plain", "pass": "train_step"}
    expected |= {"world_size": 2, "backend": "gloo", "dtype": "bfloat16", "status": "ok", "steps": 2}
    for row in times:
        assert expected.items() <= row.items()
        assert row["exposed_communication_ms"] == row["p50_ms"] - row["no_comm_ms"]
        assert ("communication_ms" in row) == (row["implementation"] != "torch")
    profiled = [row for table, rows in batches if table == "ddp_overlap" for row in rows]
    assert [row["rank"] for row in profiled] == [0, 1] * 6
    assert all(row["profiled_exposed_ms"] <= row["profiled_communication_ms"] + 1e-9 for row in profiled)
    drawn = [rows[0] for table, rows in batches if table == "ddp_timeline"]
    expected = [*single_buckets, ("bucketed", 0.1), ("torch", 0.1)]
    assert [(row["implementation"], row["bucket_size_mb"]) for row in drawn] == expected


WRONG = {"batch_sizes": [2, 3], "implementations": ["fast"], "dtypes": ["float8"], "model_size": "gigantic"}


@pytest.mark.parametrize(("name", "value"), [*WRONG.items(), ("implementations", ["single"])])
def test_it_refuses_before_anything_starts(name, value):
    with pytest.raises(ValueError, match=str(value if isinstance(value, str) else value[-1])):
        next(benchmark_ddp(2, **{name: value}))
