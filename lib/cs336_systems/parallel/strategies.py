"""What is compared on several GPUs, by name: data-parallel wrappers, and strategies of sharding."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cs336_systems.parallel.adapters import Single, TorchDDP, TorchFSDP, torch_zero
from cs336_systems.parallel.ddp import FlatDDP, NaiveDDP
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.overlapped import BucketedDDP, OverlappedDDP
from cs336_systems.parallel.reduce_scatter_ddp import ReduceScatterDDP
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer

WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "single": Single,
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "torch": TorchDDP,
}
WITH_BUCKETS = ("bucketed", "torch")  # they take bucket_size_mb


def _whole_optimizer(parameters: Iterable[nn.Parameter], optimizer_cls: type, **settings: Any) -> Optimizer:
    return optimizer_cls(parameters, **settings)


@dataclass(frozen=True)
class Sharding:
    """A strategy of training on several GPUs: who wraps the module, and who wraps its optimizer.

    wrap: called as wrap(module), where it `casts` as wrap(module, compute_dtype=...).
    make_optimizer: called as make_optimizer(parameters, optimizer class, **settings).
    wraps_optimizer: wrap is called as wrap(module, optimizer).
    casts: the wrapper itself computes in 16 bits; without, the forward runs under autocast.
    """

    wrap: Callable[..., nn.Module]
    make_optimizer: Callable[..., Optimizer] = _whole_optimizer
    wraps_optimizer: bool = False
    casts: bool = False


_bucketed = partial(BucketedDDP, bucket_size_mb=25)
SHARDINGS: dict[str, Sharding] = {
    "ddp": Sharding(_bucketed),
    "zero": Sharding(_bucketed, torch_zero),
    "sharded": Sharding(_bucketed, ShardedOptimizer),
    "sharded_scatter": Sharding(ReduceScatterDDP, ShardedOptimizer, wraps_optimizer=True),
    "fsdp2": Sharding(TorchFSDP, casts=True),
    "fsdp_weight": Sharding(FSDP, casts=True),
    "fsdp_block": Sharding(partial(FSDP, unit_types=("TransformerBlock",)), casts=True),
}
