"""The overhead model: its closed forms against the queue that they describe; and PyTorch's buckets."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.accounting.overlap_costs import (
    best_bucket_bytes,
    equal_buckets_exposed_seconds,
    exposed_seconds,
    torch_bucket_bytes,
)

seconds = st.floats(1e-6, 1.0)
links = st.fixed_dictionaries({"latency_s": seconds, "bytes_per_s": st.floats(1e6, 1e12)})
totals = st.floats(1e3, 1e11)


@given(totals, st.integers(1, 50), links, st.floats(1e-6, 100.0))
def test_equal_buckets_are_the_queue(total, buckets, link, backward_s):
    queue = exposed_seconds([total / buckets] * buckets, backward_s=backward_s, **link)
    closed = equal_buckets_exposed_seconds(total, buckets, backward_s=backward_s, **link)
    assert queue == pytest.approx(closed, rel=1e-6, abs=1e-9 * backward_s)


@given(totals, st.integers(1, 50), links)
def test_the_handouts_assumption_gives_the_handouts_sum(total, buckets, link):
    overhead = equal_buckets_exposed_seconds(total, buckets, **link)
    expected = buckets * link["latency_s"] + total / (buckets * link["bytes_per_s"])
    assert overhead == pytest.approx(expected, rel=1e-6)


@given(totals, links, st.floats(0.01, 100))
def test_no_size_beats_the_best(total, link, factor):
    best = best_bucket_bytes(total, **link)
    least = equal_buckets_exposed_seconds(total, total / best, **link)
    assert equal_buckets_exposed_seconds(total, total / (factor * best), **link) >= least * (1 - 1e-9)
    assert least == pytest.approx(2 * math.sqrt(total * link["latency_s"] / link["bytes_per_s"]), rel=1e-6)


def test_a_small_last_bucket_leaves_little():
    """A slow backward: each bucket is gone before the next is ready, and only the last one counts."""
    link = {"backward_s": 100.0, "latency_s": 0.5, "bytes_per_s": 100.0}
    assert exposed_seconds([90, 10], **link) == pytest.approx(0.6)
    assert exposed_seconds([10, 90], **link) == pytest.approx(1.4)
    assert exposed_seconds([100], **link) == pytest.approx(1.5)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 400).map(lambda size: size / 2**20))
def test_pytorchs_buckets_are_those_that_pytorch_fills(numbers, bucket_size_mb):
    parameters = [torch.empty(number, device="meta") for number in numbers]
    order = parameters[::-1]
    places = dist._compute_bucket_assignment_by_size(order, [int(bucket_size_mb * 2**20)])[0] if order else []
    expected = [sum(order[place].nbytes for place in bucket) for bucket in places]
    assert torch_bucket_bytes(parameters, bucket_size_mb) == expected


def test_pytorch_closes_a_bucket_once_it_is_full():
    """Three gradients of 3 bytes and a cap of 5: two are in before the bucket is full."""
    parameters = [torch.empty(3, dtype=torch.uint8, device="meta")] * 3
    assert torch_bucket_bytes(parameters, 5 / 2**20) == [6, 3]
