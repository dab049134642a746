"""How buckets are filled, and when the messages of real steps leave."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.bench.message_log import watch_departures
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import launch
from cs336_systems.parallel.overlapped import bucket_bytes, fill_buckets

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(sizes, st.randoms(use_true_random=False), st.integers(1, 200))
def test_every_tensor_is_in_one_bucket_and_a_bucket_keeps_its_limit(numbers, random, limit):
    dtypes = [random.choice([torch.float32, torch.bfloat16]) for _ in numbers]
    tensors = [torch.empty(n, dtype=d, device="meta") for n, d in zip(numbers, dtypes, strict=True)]
    order = random.sample(range(len(tensors)), len(tensors))
    buckets = fill_buckets(tensors, order, limit)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(tensors)))
    position = {place: number for number, place in enumerate(order)}
    completed = [position[bucket[-1]] for bucket in buckets]
    assert completed == sorted(completed)
    for bucket in buckets:
        held = [tensors[place] for place in bucket]
        assert len({tensor.dtype for tensor in held}) == 1
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held) <= limit
        assert [position[place] for place in bucket] == sorted(position[place] for place in bucket)


def test_from_the_second_step_on_each_gradient_leaves_at_once():
    rows = launch(watch_departures, 2, backend="gloo", timeout_s=60)[0]
    first, second = ([row for row in rows if row["step"] == step] for step in (1, 2))
    assert len(first) == len(second) == 21
    assert [row["ready"] for row in second] == list(range(1, 22))
    assert any(row["ready"] > row["message"] for row in first)
    assert all(row["ready"] >= row["message"] for row in first)


def test_a_bucket_leaves_with_its_last_gradient():
    rows = launch(watch_departures, 2, [0.25], backend="gloo", timeout_s=60)[0]
    second = [row for row in rows if row["step"] == 2]
    gone = 0
    for row in second:
        gone += row["gradients"]
        assert row["ready"] == gone
        assert row["mb"] <= 0.25
        assert row["buffers"] == 1
    assert gone == 21
    assert len(second) < 21


def test_bytes_of_the_buckets_of_a_model():
    parameters = build_model(model_size("tiny"), 16, device="meta").parameters()
    sizes = bucket_bytes(parameters, 0.25)
    assert [size / 2**20 for size in sizes] == pytest.approx([0.219, 0.204, 0.235], abs=1e-3)
