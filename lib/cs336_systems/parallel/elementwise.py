"""Does an optimizer update each element by itself? Only then may it be given the rows of a weight.

Muon and Shampoo (a matrix as a whole), Adafactor (means over rows and columns), LAMB (norms) and LBFGS do
not. A list of names would not know those of others, so each is tried: on a small matrix and on its halves.
"""

import inspect
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def refuse_other_optimizers(shards: Iterable[Tensor]) -> None:
    """From now on, the first step of another optimizer of these parameters raises ValueError."""
    _watch_steps()
    for shard in shards:
        shard._is_shard = True


def is_shard(parameter: Tensor) -> bool:
    return hasattr(parameter, "_is_shard")


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _tried:
        return
    for group in optimizer.param_groups:
        shards = [parameter for parameter in group["params"] if is_shard(parameter)]
        if shards and not is_elementwise(optimizer, group, shards[0]):
            raise ValueError(
                f"{type(optimizer).__name__} looks at more than one element to update it, and of FSDP it is "
                "given this rank's rows; allowed: optimizers that update each element by itself, as AdamW"
            )
    _tried.add(optimizer)


def is_elementwise(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> bool:
    """Try the optimizer's class, with the settings of one group, on tensors of this dtype and device."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return False
    known = inspect.signature(type(optimizer).__init__).parameters
    settings = {name: value for name, value in group.items() if name in known and name != "params"}
    if "lr" in settings:  # a warm-up begins with a step that changes nothing
        settings["lr"] = torch.full_like(settings["lr"], 0.1) if isinstance(settings["lr"], Tensor) else 0.1
    whole = torch.linspace(-1, 1, 24, dtype=like.dtype, device=like.device).view(6, 4)
    try:
        updated = [_after_two_steps(optimizer, settings, whole, pieces) for pieces in (1, 2)]
    except Exception:  # a class that cannot be made from the settings of its groups, or steps otherwise
        return True
    return torch.allclose(*updated, rtol=1e-4, atol=1e-6)


def _after_two_steps(like: Optimizer, settings: dict[str, Any], whole: Tensor, pieces: int) -> Tensor:
    parameters = [nn.Parameter(piece.clone()) for piece in whole.chunk(pieces)]
    trial = type(like)(parameters, **settings)
    _tried.add(trial)
    for step in (1, 2):
        gradients = (whole.square() + step * whole.roll(1) / 3).chunk(pieces)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        trial.step()
    return torch.cat([parameter.detach() for parameter in parameters])
