"""The data-parallel wrappers against one process, and what each promises beyond that."""

import time

import ddp_workers
import pytest
from torch import nn

from cs336_systems.parallel import BucketedDDP, NaiveDDP, WorkerError, launch


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_wrapper_keeps_its_promises(world_size):
    launch(ddp_workers.run_all, world_size, backend="gloo", timeout_s=120)


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2, 4)])
def test_every_wrapper_keeps_its_promises_over_nccl(world_size):
    launch(ddp_workers.run_all, world_size, backend="nccl", timeout_s=120)


def test_without_a_process_group_is_an_error_that_says_what_to_do():
    with pytest.raises(
        RuntimeError, match="NaiveDDP needs a process group; allowed: inside a worker of `launch`"
    ):
        NaiveDDP(nn.Linear(2, 2))


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf"), "25", None])
def test_bucket_size_is_checked(size):
    with pytest.raises(ValueError, match="allowed: a number above 0"):
        BucketedDDP(nn.Linear(2, 2), bucket_size_mb=size)


def _one_rank_forgets(name, backend, timeout_s, words):
    """All ranks run backward, rank 0 alone asks for the means: that must end, in an error that says where."""
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"(?s){words}"):
        launch(ddp_workers.one_rank_forgets, 2, name, backend=backend, timeout_s=timeout_s)
    assert time.monotonic() - start < timeout_s + 20


@pytest.mark.parametrize("name", ddp_workers.WRAPPERS)
def test_a_rank_that_forgets_to_finish_is_an_error(name):
    _one_rank_forgets(name, "gloo", 10, "^rank 0 .* in finish_gradient_synchronization")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "some buckets"])
def test_over_nccl_a_rank_that_forgets_to_finish_is_an_error(name):
    # Starting a message does not wait for the peer; what waits for the GPU does.
    _one_rank_forgets(name, "nccl", 15, "rank 0.* in (finish_gradient_synchronization|synchronize)")
