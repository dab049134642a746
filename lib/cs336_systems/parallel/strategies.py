"""What is compared on several GPUs, by name: data-parallel wrappers, and strategies of sharding.

PyTorch's own, and one process alone, are given the interface of ours. What takes seconds to import waits.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from cs336_systems.parallel.ddp import FlatDDP, NaiveDDP, broadcast_from_rank_0
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.overlapped import BucketedDDP, OverlappedDDP, ReduceScatterDDP
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer

# PyTorch 2.13 renamed this one and warns about the old name.
_parameters = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _parameters else "broadcast_buffers"
)


class Single(nn.Module):
    """Single-process baseline."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do."""


class TorchDDP(DistributedDataParallel):
    """PyTorch's own: it averages during backward. Like ours it leaves buffers alone between steps."""

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        options = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}
        super().__init__(module, bucket_cap_mb=bucket_size_mb, **options)

    finish_gradient_synchronization = Single.finish_gradient_synchronization


class TorchFSDP(Single):
    """PyTorch's FSDP2: `fully_shard` of each block of a TransformerLM, and of what is around them.

    Args:
        compute_dtype: to which weights are cast before they are gathered; gradients are reduced in it too,
            and kept in the dtype of the weights.
        reshard: free the blocks' whole weights after forward, and gather them again in backward; without,
            they are gathered once a step and held until backward has used them (as ZeRO 2 does).
    """

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None, reshard: bool = True
    ):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        broadcast_from_rank_0(module)
        # By default the mesh is of GPUs wherever there is one, also for ranks that share its machine's CPU.
        mesh = dist.init_device_mesh(
            next(module.parameters()).device.type, (dist.get_world_size(),)
        )
        options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype)}
        for block in module.layers:
            fully_shard(block, reshard_after_forward=reshard, **options)
        fully_shard(module, **options)
        super().__init__(module)


def torch_zero(parameters: Iterable[nn.Parameter], **settings: Any) -> Optimizer:
    """PyTorch's ZeroRedundancyOptimizer of AdamW; its `state` is that of the optimizer inside."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(parameters, AdamW, **settings)
    zero.state = zero.optim.state
    return zero


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "single": Single,
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "torch": TorchDDP,
}
WITH_BUCKETS = ("bucketed", "torch")  # they take bucket_size_mb


@dataclass(frozen=True)
class Sharding:
    """A strategy of training on several GPUs: who wraps the module, and who wraps its optimizer."""

    # Called as wrap(module); where it casts, as wrap(module, compute_dtype=...); or wrap(module, optimizer).
    wrap: Callable[..., nn.Module]
    make_optimizer: Callable[..., Optimizer] = (
        AdamW  # called as make_optimizer(parameters, **settings)
    )
    wraps_optimizer: bool = False
    casts: bool = (
        False  # the wrapper itself computes in 16 bits; without, the forward runs under autocast
    )


_bucketed, _sharded = (
    partial(BucketedDDP, bucket_size_mb=25),
    partial(ShardedOptimizer, optimizer_cls=AdamW),
)
SHARDINGS: dict[str, Sharding] = {
    "ddp": Sharding(_bucketed),
    "zero": Sharding(_bucketed, torch_zero),
    "sharded": Sharding(_bucketed, _sharded),
    "sharded_scatter": Sharding(ReduceScatterDDP, _sharded, wraps_optimizer=True),
    "fsdp2": Sharding(TorchFSDP, casts=True),
    "fsdp2_kept": Sharding(partial(TorchFSDP, reshard=False), casts=True),
    "fsdp_weight": Sharding(FSDP, casts=True),
    "fsdp_block": Sharding(partial(FSDP, unit_types=("TransformerBlock",)), casts=True),
    "fsdp_kept": Sharding(
        partial(FSDP, unit_types=("TransformerBlock",), reshard=False), casts=True
    ),
}
