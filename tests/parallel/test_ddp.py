"""The data-parallel wrappers against one process, and what each promises beyond that."""

import ddp_workers
import forgetful_worker
import pytest
from torch import nn

from cs336_systems.parallel import BucketedDDP, NaiveDDP, WorkerError, launch


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


@pytest.mark.parametrize(
    ("backend", "timeout_s"), [("gloo", 100), pytest.param("nccl", 20, marks=pytest.mark.gpu(2))]
)
def test_a_rank_that_forgets_to_finish_is_an_error_that_says_where(backend, timeout_s):
    # Gloo sees that the peer has ended. Over NCCL, what waits for the GPU waits until the time is up.
    where = "(?s)^rank 0.* in (finish_gradient_synchronization|synchronize)"
    with pytest.raises(WorkerError, match=where):
        launch(forgetful_worker.one_rank_forgets, 2, backend=backend, timeout_s=timeout_s)
