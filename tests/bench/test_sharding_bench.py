"""The benchmark of the sharding strategies, at its smallest."""

import pandas as pd
import pytest
import sharding_workers

from cs336_systems.accounting.sharding_costs import SHARDED
from cs336_systems.bench import SHARDING_SLUG, benchmark_sharding
from cs336_systems.bench.model_bench import model_key
from cs336_systems.configs import model_size
from cs336_systems.parallel import launch
from cs336_systems.parallel.strategies import SHARDINGS
from labbook import load_rows, save_rows

SMALL = {"backend": "gloo", "context_length": 8, "batch_size": 2}


def test_rows_of_two_rounds_the_second_in_reverse():
    strategies = ["ddp", "fsdp_block"]
    batches = list(benchmark_sharding(2, **SMALL, implementations=strategies, warmup_steps=1, steps=3))
    for table, rows in batches:
        save_rows(rows, SHARDING_SLUG, table, machine="somewhere")
    looked = ["sharding_messages", "sharding_memory", "sharding_memory_timeline"]
    assert [table for table, _ in batches] == [*looked, *looked, "sharding_times", "sharding_times"]
    times = [row for table, rows in batches if table == "sharding_times" for row in rows]
    assert [row["implementation"] for row in times] == strategies[::-1]
    expected = {"model_size": "tiny", "attention": "sdpa", "pass": "train_step", "warmup_steps": 1}
    expected |= {"world_size": 2, "backend": "gloo", "batch_size": 2, "steps": 3, "status": "ok"}
    for row in times:
        assert expected.items() <= row.items()
        assert row["no_comm_ms"] > 0
        assert row["exposed_communication_ms"] == row["p50_ms"] - row["no_comm_ms"]
    memory = load_rows(SHARDING_SLUG, "somewhere", "sharding_memory").query("moment == 'peak'")
    peak = memory.set_index(["implementation", "category"])["size_mib"]
    held = load_rows(SHARDING_SLUG, "somewhere", "sharding_memory_timeline")
    for name in strategies:  # both are of the fullest rank, and the timeline keeps its peak
        points = held[held["implementation"] == name].pivot(
            index="point", columns="category", values="size_mib"
        )
        assert points.ffill().fillna(0).sum(axis=1).max() == pytest.approx(peak[name].sum(), rel=1e-3)
        assert {*SHARDED} <= set(points)


def test_out_of_memory_is_a_row_and_skips_what_follows():
    keys = [
        model_key(model_size("tiny"), 8, 2, "train_step", dtype, name, 0, "sdpa")
        | {"world_size": 2, "backend": "gloo"}
        for dtype in ("float32", "bfloat16")
        for name in ("ddp", "zero", "sharded")
    ]
    first, second = launch(sharding_workers.measure_with_too_little_memory, 2, keys, "zero", backend="gloo")
    assert [(row["implementation"], row["status"]) for row in first[:3]] == [
        ("zero", "oom"),
        ("sharded", "skipped"),
        ("ddp", "skipped"),
    ]
    assert len(first) == len(keys)
    assert {row["status"] for row in first[1:]} == {"skipped"}
    assert "out of memory" in first[0]["reason"]
    assert [row["status"] for row in second] == [row["status"] for row in first]


def test_collectives_are_seen_and_can_be_left_out():
    (sent, left_out), _ = launch(sharding_workers.sent_and_left_out, 2, backend="gloo")
    assert sent[0] == left_out[0] == [("all_reduce", 16, "float32"), ("all_gather", 32, "float32")]
    assert sent[1:] == ([1.0] * 4, [1.0] * 8)
    assert left_out[1:] == ([0.0] * 4, [-1.0] * 8)


@pytest.mark.gpu(2)
def test_rows_over_nccl_and_their_memory():
    """The closed form holds on GPUs too, within two percent and the libraries' workspaces."""
    options = {"backend": "nccl", "model_size": "medium", "context_length": 256, "batch_size": 8}
    batches = list(benchmark_sharding(2, **options, dtypes=["float32", "bfloat16"], steps=4))
    memory = pd.DataFrame([row for table, rows in batches if table == "sharding_memory" for row in rows])
    sums = memory.groupby(["implementation", "dtype", "moment"])[["size_mib", "predicted_mib"]].sum()
    assert (sums["predicted_mib"] < 1.02 * sums["size_mib"]).all()
    assert (sums["predicted_mib"] > 0.98 * sums["size_mib"] - 128).all()
    times = pd.DataFrame([row for table, rows in batches if table == "sharding_times" for row in rows])
    assert set(times["status"]) == {"ok"}
    assert set(times["implementation"]) == set(SHARDINGS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"implementations": ["naive"]}, "implementation 'naive' is unknown; allowed: ddp, zero"),
        ({"rounds": 4, "steps": 3}, "rounds is 4; allowed: 1 to 3"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_it_refuses_before_anything_starts(options, words):
    with pytest.raises(ValueError, match=words):
        next(benchmark_sharding(2, **options))
