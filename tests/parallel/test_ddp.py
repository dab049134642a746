"""The data-parallel wrappers against one process, and what each promises beyond that."""

import ddp_workers
import pytest
from torch import nn

from cs336_systems.parallel import BucketedDDP, NaiveDDP, launch


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_wrapper_keeps_its_promises(world_size):
    launch(ddp_workers.run_all, world_size, backend="gloo", timeout_s=200)


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2, 4)])
def test_every_wrapper_keeps_its_promises_over_nccl(world_size):
    launch(ddp_workers.run_all, world_size, backend="nccl", timeout_s=200)


def test_without_a_process_group_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"NaiveDDP .* `launch`"):
        NaiveDDP(nn.Linear(2, 2))


@pytest.mark.parametrize("size", [0, float("nan"), "25"])
def test_bucket_size_is_checked(size):
    with pytest.raises(ValueError, match="bucket_size_mb"):
        BucketedDDP(nn.Linear(2, 2), bucket_size_mb=size)
