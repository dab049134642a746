"""What our wrappers are compared with, given their interface: one process alone, and PyTorch's own."""

import contextlib
import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cs336_systems.parallel.ddp import broadcast_from_rank_0

# PyTorch 2.13 renamed this one and warns about the old name.
_parameters = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _parameters else "broadcast_buffers"


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
    """PyTorch's own: it averages during backward and leaves nothing to finish.

    Like ours it leaves buffers alone between steps.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        options = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}
        super().__init__(module, bucket_cap_mb=bucket_size_mb, **options)

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do."""


class TorchFSDP(Single):
    """PyTorch's FSDP2: `fully_shard` of each block of a TransformerLM, and of what is around them.

    Args:
        compute_dtype: to which weights are cast before they are gathered; gradients are reduced in it too,
            and kept in the dtype of the weights.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None):
        # Not above: it takes seconds to import.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        broadcast_from_rank_0(module)
        # By default the mesh is of GPUs wherever there is one, also for ranks that share its machine's CPU.
        device = next(module.parameters()).device.type
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
        shard = partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype))
        for layer in module.layers:
            shard(layer)
        super().__init__(shard(module))


def torch_zero(parameters: Iterable[nn.Parameter], optimizer_cls: type, **settings: Any) -> Optimizer:
    """PyTorch's ZeroRedundancyOptimizer; its `state` is that of the optimizer inside."""
    # Not above: it takes seconds to import.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(parameters, optimizer_cls, **settings)
    zero.state = zero.optim.state
    return zero
