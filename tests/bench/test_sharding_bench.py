"""The benchmark of the sharding strategies, at its smallest."""

import pandas as pd
import pytest
import sharding_workers

from cs336_systems.accounting.sharding_costs import SHARDED
from cs336_systems.bench import SHARDING_SLUG, benchmark_sharding, profile_sharding
from cs336_systems.bench.model_bench import model_key
from cs336_systems.configs import model_size
from cs336_systems.measure.gathers import gather_times
from cs336_systems.parallel import launch
from cs336_systems.parallel.strategies import SHARDINGS
from labbook import load_rows, save_rows
from labbook.profiles.table import Profile

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


def test_profiles_tell_lanes_and_gathers():
    strategies = ["ddp", "fsdp2", "fsdp_block", "fsdp_weight"]
    batches = list(profile_sharding(2, **SMALL, implementations=strategies))
    for table, rows in batches:
        save_rows(rows, "fsdp_accounting", table, machine="somewhere")
    assert [rows[0]["implementation"] for table, rows in batches if table == "ddp_timeline"] == strategies
    gathers = pd.concat(pd.DataFrame(rows) for table, rows in batches if table == "gathers")
    assert list(gathers["implementation"].unique()) == strategies[1:]
    assert (gathers["end_ms"] > gathers["start_ms"]).all()
    counts = gathers.groupby(["implementation", "pass"])["calls"].sum()
    assert counts.to_dict() == {
        ("fsdp2", "forward"): 3,
        ("fsdp2", "backward"): 2,
        ("fsdp_block", "forward"): 16,
        ("fsdp_block", "backward"): 15,
        ("fsdp_weight", "forward"): 16,
        ("fsdp_weight", "backward"): 15,
    }


def _profile(kernels, ranges):
    columns = ["name", "stream", "launch_ns", "start_ns", "end_ns"]
    kernels = pd.DataFrame(kernels, columns=columns).assign(kind="kernel", process=1, thread=1, grid="")
    ranges = pd.DataFrame(ranges, columns=["name", "start_ns", "end_ns"]).assign(process=1, thread=1)
    return Profile("torch cuda", "somewhere", ranges, kernels)


GATHER = "ncclDevKernel_AllGather_RING_LL(int)"
MS = 1_000_000
KERNELS = [
    (GATHER, 7, 1 * MS, 2 * MS, 4 * MS),  # embedding
    (GATHER, 7, 1 * MS, 4 * MS, 9 * MS),  # block 0: late
    ("gemm", 0, 2 * MS, 4 * MS, 6 * MS),
    ("cast", 7, 2 * MS, 3 * MS, 30 * MS),  # beside the computation, however long
    (GATHER, 7, 3 * MS, 9 * MS, 11 * MS),  # head
    ("gemm", 0, 4 * MS, 9 * MS, 20 * MS),
    ("gemm", 0, 5 * MS, 20 * MS, 26 * MS),
    (GATHER, 7, 28 * MS, 28 * MS, 29 * MS),  # block 0 again
    ("gemm", 0, 33 * MS, 34 * MS, 40 * MS),  # the host is late
    ("gemm", 0, 34 * MS, 40 * MS, 60 * MS),
]
RANGES = [
    ("measure", 0, 50 * MS),
    ("forward", 0, 26 * MS),
    ("backward", 27 * MS, 50 * MS),
    ("needs token_embeddings", 1 * MS + 1, 1 * MS + 2),
    ("needs layers.0", 3 * MS, 3 * MS + 1),
    ("needs lm_head", 4 * MS + 1, 4 * MS + 2),
    ("needs lm_head", 27 * MS + 1, 27 * MS + 2),
    ("needs layers.0", 32 * MS, 32 * MS + 1),
]


def test_a_gather_is_late_when_the_computing_stream_had_nothing_else_to_do():
    found = gather_times(_profile(KERNELS, RANGES), ["token_embeddings", "layers.0", "lm_head"], ["layers.0"])
    assert list(found["unit"]) == ["token_embeddings", "layers.0", "lm_head", "layers.0"]
    assert list(found["end_ms"]) == [4, 9, 11, 29]
    # Nothing to compute before; the embedding computed; block 0 did; in backward the host launched so late.
    assert list(found["needed_ms"]) == [2, 6, 20, 33]


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
