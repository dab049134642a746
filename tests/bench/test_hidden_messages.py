"""Messages beside a backward that waits for none of them, at tiny sizes over gloo."""

import pytest
from bench_workers import hidden_messages

from cs336_systems.bench import benchmark_hidden_messages
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import bucket_bytes, launch
from labbook import save_rows


def test_a_row_for_each_bucket_size():
    run = {"context_length": 8, "batch_sizes": [2], "dtypes": ["bfloat16"], "bucket_sizes_mb": [0.1, 100]}
    rows = [
        row
        for rows in benchmark_hidden_messages(2, backend="gloo", warmup_steps=1, steps=2, **run)
        for row in rows
    ]
    save_rows(rows, "ddp_bucketed_benchmarking", "hidden_messages", machine="somewhere")
    model = build_model(model_size("tiny"), 8, device="meta")
    assert [row["calls"] for row in rows] == [
        len(bucket_bytes(model.parameters(), size)) for size in (0.1, 100)
    ]
    for row in rows:
        assert {
            "pass": "forward_backward",
            "world_size": 2,
            "dtype": "bfloat16",
            "status": "ok",
        }.items() <= row.items()
        assert min(row["p50_ms"], row["no_comm_ms"], row["issue_ms"]) > 0


def test_messages_leave_during_backward_with_the_bytes_of_their_buckets():
    sent, without, gradients_alike = launch(hidden_messages, 2, 0.1, backend="gloo")[0]
    model = build_model(model_size("tiny"), 8, device="meta")
    assert sent == bucket_bytes(model.parameters(), 0.1)
    assert without == []
    assert gradients_alike, "messages touch no gradient"


def test_it_refuses_before_anything_starts():
    for name, value in {"batch_sizes": [3], "dtypes": ["float8"], "model_size": "gigantic"}.items():
        with pytest.raises(ValueError, match=str(value if isinstance(value, str) else value[0])):
            next(benchmark_hidden_messages(2, **{name: value}))
