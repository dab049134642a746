"""What is compared on several GPUs, by name: data-parallel wrappers, and strategies of sharding.

PyTorch's own, and one process alone, are given the interface of ours. A new strategy is an entry of
SHARDINGS; its label is one of notebooks/vocabulary.py.
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
from cs336_systems.parallel.overlapped import BucketedDDP, OverlappedDDP, RoundedDDP
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer
from cs336_systems.sharding import AROUND_BLOCKS, OPTIMIZER_STATE, Sharding

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
            and kept in the dtype of the weights. None: all of it in the dtype of the weights.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None):
        # Not above: it takes seconds to import.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        broadcast_from_rank_0(module)
        # By default the mesh is of GPUs wherever there is one, also for ranks that share its machine's CPU.
        device = next(module.parameters()).device
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        # Without a reduce_dtype PyTorch up to 2.14 reduces in the compute dtype, and from 2.15 on in that of
        # the weights' gradients, float32: twice the bytes, without a warning.
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype)
        options = {"mesh": mesh, "mp_policy": policy}
        for part in list(module.layers) + [module]:
            fully_shard(part, **options)
        super().__init__(module)


def torch_zero(parameters: Iterable[nn.Parameter], **settings: Any) -> Optimizer:
    """PyTorch's ZeroRedundancyOptimizer of AdamW; its `state` is that of the optimizer inside."""
    # Not above: it takes seconds to import.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(parameters, AdamW, **settings)
    zero.state = zero.optim.state
    return zero


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "torch": TorchDDP,
}
WITH_BUCKETS = ("bucketed", "torch")  # they take bucket_size_mb


def wrapper(name: str, bucket_size_mb: float | None = None) -> Callable[[nn.Module], nn.Module]:
    """One of WRAPPERS; of those WITH_BUCKETS, with its size."""
    options = {} if bucket_size_mb is None else {"bucket_size_mb": bucket_size_mb}
    return partial(WRAPPERS[name], **options)


@dataclass(frozen=True)
class Strategy(Sharding):
    """A strategy of training on several GPUs: what wraps the module, and what updates it."""

    # Called as wrap(module); where it casts or rounds, as wrap(module, compute_dtype=...).
    wrap: Callable[..., nn.Module]
    # Called as make_optimizer(parameters, **settings).
    make_optimizer: Callable[..., Optimizer] = AdamW

    def apply(self, module: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
        """The module wrapped, to compute in this dtype where the wrapper casts, and its fused AdamW."""
        narrows = (self.casts or self.rounds) and dtype.itemsize < 4
        options = {"compute_dtype": dtype} if narrows else {}
        wrapped = self.wrap(module, **options)
        # Of the wrapped module: an FSDP has put shards in place of its parameters.
        return wrapped, self.make_optimizer(wrapped.parameters(), fused=True)


_bucketed = partial(BucketedDDP, bucket_size_mb=25)
_sharded = partial(ShardedOptimizer, optimizer_cls=AdamW)
_by_block = partial(FSDP, unit_types=("TransformerBlock",))
_state = {"shards": OPTIMIZER_STATE}
_ours = {"replicates": ("norms",)}
SHARDINGS: dict[str, Strategy] = {
    "ddp": Strategy(_bucketed, sends=("all_reduce",), shards=()),
    "ddp_rounded": Strategy(
        partial(RoundedDDP, bucket_size_mb=25), sends=("all_reduce",), shards=(), rounds=True
    ),
    "zero": Strategy(_bucketed, torch_zero, sends=("all_reduce", "broadcast"), **_state),
    "sharded": Strategy(_bucketed, _sharded, sends=("all_reduce", "all_gather"), **_state),
    "fsdp2": Strategy(TorchFSDP, unit="block", ahead=1, copies=True, stays=AROUND_BLOCKS),
    "fsdp_weight": Strategy(FSDP, unit="weight", ahead=2, stays=("lm_head",), **_ours),
    "fsdp_block": Strategy(_by_block, unit="block", ahead=1, stays=("lm_head",), **_ours),
}
