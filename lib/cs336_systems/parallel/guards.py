"""What wrappers and the sharded optimizer refuse, in one sentence and on every rank, before it goes wrong."""

import inspect
import math
from collections.abc import Iterable
from functools import cache, partial
from itertools import zip_longest
from numbers import Real
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


def check_process_group(what: Any) -> None:
    """Refuse (RuntimeError) to make an object without a process group."""
    if not dist.is_initialized():
        name = type(what).__name__
        raise RuntimeError(
            f"{name} needs a process group; allowed: in a worker of `launch`, under torchrun"
        )


def check_ranks_agree(description: list[str]) -> None:
    """Compare with rank 0's lines: a mismatch is a ValueError on every rank now, and not a hang later."""
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, description)
    for rank, lines in enumerate(everyone):
        for first, other in zip_longest(everyone[0], lines, fillvalue="nothing"):
            if first != other:
                raise ValueError(
                    f"the ranks diverge: rank 0 has {first!r} where rank {rank} has {other!r}; allowed: the "
                    "same parameters, arguments and order of modules on all ranks"
                )


def describe(tensor: Tensor) -> str:
    """What must be the same of a tensor on every rank."""
    kind = f"{'lazy' if is_lazy(tensor) else tuple(tensor.shape)} {tensor.dtype}"
    return kind if tensor.requires_grad else f"{kind} without gradient"


def check_tensors(what: str, tensors: Iterable[Tensor]) -> None:
    """Refuse (ValueError) tensors without memory (meta, or lazy before a first input), or on two devices."""
    devices = {"meta" if is_lazy(tensor) else str(tensor.device) for tensor in tensors}
    if "meta" in devices:
        raise ValueError(
            f"{what} has a tensor without values (meta, or lazy); allowed: with values"
        )
    if len(devices) > 1:
        raise ValueError(
            f"{what} has tensors on {' and '.join(sorted(devices))}; allowed: one device"
        )


def check_still_frozen(frozen: Iterable[Tensor]) -> None:
    """Refuse (RuntimeError) gradients of parameters that had none before: they would be left out."""
    if any(parameter.grad is not None for parameter in frozen):
        raise RuntimeError(
            "a parameter has a gradient that was frozen when wrapped or given; allowed: unfrozen before that"
        )


def check_bucket_size(bucket_size_mb: Any) -> None:
    """Refuse (ValueError) what is not a positive number."""
    if not (isinstance(bucket_size_mb, Real) and 0 < bucket_size_mb < math.inf):
        raise ValueError(f"bucket_size_mb is {bucket_size_mb!r}; allowed: a number above 0")


def refuse_copies(self: Any, protocol: Any) -> NoReturn:
    """The `__reduce_ex__` of what has only this rank's part of something."""
    raise TypeError(
        "FSDP and ShardedOptimizer cannot be copied or pickled; allowed: the module before it is wrapped, "
        "state_dict(), gather_full_parameters()"
    )


def needs_closure(kind: type[Optimizer]) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_other_optimizers(shards: Iterable[Tensor]) -> None:
    """From now on, an optimizer that does not update each element by itself is refused at its first step.

    It is given the rows of a weight. Muon and Shampoo (a matrix as a whole), Adafactor (means over rows and
    columns), LAMB (norms) and LBFGS need all of it. A list of names would not know those of others, so each
    is tried: on a small matrix and on its halves.
    """
    _watch_steps()
    for shard in shards:
        shard._is_shard = True


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups if not hasattr(optimizer, "_is_elementwise") else ():
        shards = [parameter for parameter in group["params"] if hasattr(parameter, "_is_shard")]
        if shards and not _is_elementwise(type(optimizer), group, shards[0]):
            raise ValueError(
                f"{type(optimizer).__name__} looks at more than one element to update it, and of FSDP it is "
                "given this rank's rows; allowed: optimizers that update each element by itself, as AdamW"
            )
    optimizer._is_elementwise = True


_watch_steps = cache(partial(register_optimizer_step_pre_hook, _before_step))


def _is_elementwise(kind: type[Optimizer], group: dict[str, Any], like: Tensor) -> bool:
    """Try an optimizer's class, with the settings of one group, on tensors of this dtype and device."""
    known = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in group.items() if name in known and name != "params"}
    if "lr" in settings:  # a warm-up begins with a step that changes nothing
        settings["lr"] = 0.1
    whole = torch.linspace(-1, 1, 24, dtype=like.dtype, device=like.device).view(6, 4)
    parameters = [nn.Parameter(piece.clone()) for piece in (whole, *whole.chunk(2))]
    try:
        trial = kind(parameters, **settings)
        for step in (1, 2):
            gradient = whole.square() + step * whole.roll(1) / 3
            for parameter, piece in zip(parameters, (gradient, *gradient.chunk(2)), strict=True):
                parameter.grad = piece.clone()
            trial.step()
    except (
        Exception
    ):  # a class that cannot be made from the settings of its groups, or steps otherwise
        return not needs_closure(kind)
    updated, *halves = (parameter.detach() for parameter in parameters)
    return torch.allclose(updated, torch.cat(halves), rtol=1e-4, atol=1e-6)
