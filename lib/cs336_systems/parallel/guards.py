"""What wrappers and the sharded optimizer refuse, in one sentence and on every rank, before it goes wrong."""

from collections.abc import Iterable
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
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
    kind = f"{tuple(tensor.shape)} {tensor.dtype}"
    return kind if tensor.requires_grad else f"{kind} without gradient"


def check_have_values(what: str, tensors: Iterable[Tensor]) -> None:
    """Refuse (ValueError) tensors without memory: meta, or lazy before a first input."""
    if any(is_lazy(tensor) or tensor.is_meta for tensor in tensors):
        raise ValueError(
            f"{what} has a tensor without values (meta, or lazy); allowed: with values"
        )


def check_bucket_size(bucket_size_mb: Any) -> None:
    """Refuse (ValueError) what is not positive, NaN too."""
    if not bucket_size_mb > 0:
        raise ValueError(f"bucket_size_mb is {bucket_size_mb!r}; allowed: a number above 0")


def refuse_copies(self: Any, protocol: Any) -> NoReturn:
    """The `__reduce_ex__` of what has only this rank's part of something."""
    raise TypeError(
        "FSDP and ShardedOptimizer cannot be copied or pickled; allowed: the module before it is wrapped, "
        "state_dict(), gather_full_parameters()"
    )


def place() -> list[int]:
    """Whose a part is: the rank and the number of ranks."""
    return [dist.get_rank(), dist.get_world_size()]


def mark_state(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook of `state_dict()`: whose shards these are."""
    # In the shape of an empty tensor, which stays whatever is done to all tensors of a state.
    state[prefix + "shard_of"] = torch.empty(0, *place())


def check_state(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook of `load_state_dict()`: ValueError for the shards of another rank, or of other ranks."""
    mark = state.pop(prefix + "shard_of", None)
    check_place(None if mark is None else list(mark.shape[1:]))


def check_place(shard: Any) -> None:
    """Refuse (ValueError) what was not saved on this rank of as many ranks."""
    if shard != place():
        raise ValueError(
            f"the state is of shard {shard} (rank, ranks); allowed: {place()}, what state_dict() gave on "
            "this rank"
        )


def watch_parts(parts: Iterable[Tensor]) -> None:
    """These are this rank's rows or slices of weights: from now on a step of an optimizer looks for such.

    PyTorch's optimizers that do not treat each element by itself are refused: they would compute another
    update without an error. Muon needs a matrix as a whole, Adafactor means over its rows and columns, LBFGS
    scalar products over all parameters. Of the others each group notes the rank, which is saved and loaded
    with it: what was loaded from another rank's is refused as well.
    """
    _watch_steps()
    for part in parts:
        part._is_shard = True


_NEED_WHOLE_WEIGHTS = {"Adafactor", "LBFGS", "Muon"}  # all of torch.optim, from 2.11 to 2.15


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if not any(hasattr(parameter, "_is_shard") for parameter in group["params"]):
            continue
        if not _NEED_WHOLE_WEIGHTS.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
            raise ValueError(
                f"{type(optimizer).__name__} looks at more than one element to update it, and it is given "
                "this rank's part of a weight; allowed: optimizers that update each element by itself, as "
                "AdamW"
            )
        check_place(group.setdefault("shard", place()))


# One hook for all optimizers: it is the wrapper that knows the shards, and it may come after the optimizer.
_watch_steps = cache(partial(register_optimizer_step_pre_hook, _before_step))
