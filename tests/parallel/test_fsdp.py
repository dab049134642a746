"""FSDP against one process, what it promises beyond that, and its checkpoints."""

import fsdp_workers
import pytest
import torch
from torch import nn

from cs336_systems.parallel import FSDP, WorkerError, launch


@pytest.mark.parametrize("world_size", [2, 4])
def test_it_keeps_its_promises(world_size):
    launch(fsdp_workers.run_all, world_size, backend="gloo", timeout_s=300)


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
def test_it_keeps_its_promises_over_nccl(world_size):
    launch(fsdp_workers.run_all, world_size, backend="nccl", timeout_s=300)


@pytest.mark.gpu(2)
def test_on_gpus_memory_is_freed_and_gathers_hide():
    launch(fsdp_workers.on_gpus, 2, backend="nccl", timeout_s=300)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": 3}, "prefetch is 3; allowed"),
        ({"prefetch": None}, "prefetch is None; allowed"),
        ({"compute_dtype": torch.int8}, "compute_dtype is torch.int8; allowed"),
        ({"compute_dtype": "bfloat16"}, "compute_dtype is 'bfloat16'; allowed"),
    ],
)
def test_arguments_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        FSDP(nn.Linear(2, 2), **options)


def test_it_needs_a_process_group_and_peers():
    with pytest.raises(RuntimeError, match="FSDP needs a process group"):
        FSDP(nn.Linear(2, 2))
    with pytest.raises(WorkerError, match="the number of ranks is 1; allowed: 2 or more"):
        launch(fsdp_workers.stale_weights, 1, backend="gloo")
