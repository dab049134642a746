"""The sharded optimizer against the optimizer that it shards."""

import pytest
import sharded_workers
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import ShardedOptimizer, deal_tensors, launch, segment_bytes, shard_bytes


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu(2))])
def test_it_keeps_its_promises_and_its_checkpoints_move_between_worlds(backend, tmp_path):
    files = [tmp_path / f"{number}.pt" for number in range(3)]
    sizes = (2, 3, 2) if backend == "gloo" else (2, 2, 2)
    options = {"backend": backend, "timeout_s": 200}
    launch(sharded_workers.run_all, sizes[0], None, files[0], **options)
    launch(sharded_workers.run_all, sizes[1], files[0], files[1], **options)
    launch(sharded_workers.train_on, sizes[2], files[1], files[2], **options)
    # The same steps alone, the last two from the checkpoint of the sharded ones.
    alone = sharded_workers.Odd()
    optimizer = AdamW(alone.groups())
    for step in range(6):
        if step == 4:
            optimizer.load_state_dict(torch.load(files[1])["optimizer"])
        sharded_workers.set_gradients(alone, step)
        optimizer.step()
    if backend == "gloo":
        resumed = sharded_workers.Odd()
        resumed.load_state_dict(torch.load(files[2])["module"])
        sharded_workers.assert_same(resumed, alone)


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
def test_the_sizes_of_the_handout_are_dealt_almost_evenly(world_size, padding):
    for name, edition in (("medium", 2025), ("xl", 2025), ("xl", 2026)):
        tensors = list(build_model(model_size(name, edition), 16, device="meta").parameters())
        buckets = deal_tensors(tensors, world_size, 512)
        assert sum(len(segment) for segments in buckets for segment in segments) == len(tensors)
        total = sum(shard_bytes(buckets))
        assert total == sum(tensor.nbytes for tensor in tensors)
        padded = world_size * sum(segment_bytes(segments) for segments in buckets)
        assert total <= padded <= (1 + padding) * total
