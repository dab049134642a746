"""The sharded optimizer against the optimizer that it shards."""

import pytest
import sharded_workers
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import ShardedOptimizer, launch, partition_tensors, segment_bytes, shard_bytes


@pytest.mark.parametrize(
    ("backend", "world_size"), [("gloo", 2), ("gloo", 3), pytest.param("nccl", 2, marks=pytest.mark.gpu(2))]
)
def test_it_keeps_its_promises(backend, world_size):
    launch(sharded_workers.run_all, world_size, backend=backend, timeout_s=200)


def test_a_world_of_one_is_told_what_to_use(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"world size is 1; allowed: 2 or more .*AdamW itself"):
            ShardedOptimizer(nn.Linear(2, 2).parameters(), AdamW)
    finally:
        dist.destroy_process_group()


def test_without_a_process_group_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"ShardedOptimizer .* `launch`"):
        ShardedOptimizer(nn.Linear(2, 2).parameters(), AdamW)


@pytest.mark.parametrize(("world_size", "padding"), [(2, 1e-5), (3, 0.01), (8, 0.02)])
def test_the_sizes_of_the_handout_are_partitioned_almost_evenly(world_size, padding):
    for name, edition in (("medium", 2025), ("xl", 2025), ("xl", 2026)):
        tensors = list(build_model(model_size(name, edition), 16, device="meta").parameters())
        buckets = partition_tensors(tensors, world_size, 512)
        assert sum(len(segment) for segments in buckets for segment in segments) == len(tensors)
        total = sum(shard_bytes(buckets))
        assert total == sum(tensor.nbytes for tensor in tensors)
        padded = world_size * sum(segment_bytes(segments) for segments in buckets)
        assert total <= padded <= (1 + padding) * total
