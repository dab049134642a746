"""How buckets are filled."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.parallel import fill_buckets

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(SIZES, st.randoms(use_true_random=False), st.integers(1, 200))
def test_every_tensor_is_in_one_bucket_and_a_bucket_keeps_its_limit(numbers, random, limit):
    dtypes = [random.choice([torch.float32, torch.bfloat16]) for _ in numbers]
    tensors = [torch.empty(n, dtype=d, device="meta") for n, d in zip(numbers, dtypes, strict=True)]
    order = random.sample(range(len(tensors)), len(tensors))
    buckets = fill_buckets(tensors, order, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    position = {index: number for number, index in enumerate(order)}
    completed = [position[bucket[-1]] for bucket in buckets]
    assert completed == sorted(completed)
    for bucket in buckets:
        held = [tensors[index] for index in bucket]
        assert len({tensor.dtype for tensor in held}) == 1
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held) <= limit
        assert [position[index] for index in bucket] == sorted(position[index] for index in bucket)
