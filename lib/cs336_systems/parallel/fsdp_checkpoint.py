"""Save and load what FSDP shards, each rank its part, with torch.distributed.checkpoint.

To the checkpoint a shard is a DTensor, sharded by rows: so it knows which rows a file holds, and a rank reads
those that are its own, however many ranks wrote them. A checkpoint has its folder's name only once it is
complete: whoever is killed while saving leaves `<name>.unfinished`, and every earlier checkpoint as it was.
"""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.fsdp import FSDP

_GROUPS = "optimizer_groups"


def save_checkpoint(folder: str | Path, model: FSDP, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the parameters and buffers, and the state of their optimizer; all ranks call it together.

    Args:
        folder: a new one, which all ranks reach.
        optimizer: one that keeps tensors of the parameters' shapes, and numbers, as AdamW and SGD do.

    Raises:
        FileExistsError: there is one of this name. On every rank.
        ValueError: the optimizer's state is not of that kind.
    """
    import torch.distributed.checkpoint as dcp  # not above: it takes seconds to import

    folder = Path(folder)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    state = _state(model, optimizer)
    _on_rank_0(_make_room, folder, unfinished)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(unfinished))
    _on_rank_0(unfinished.rename, folder)


def load_checkpoint(folder: str | Path, model: FSDP, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what `save_checkpoint` wrote, into a model and optimizer of the same kind; all ranks together.

    The number of ranks and the units may be others than those that saved.

    Raises:
        FileNotFoundError: there is no complete checkpoint of this name. On every rank.
        ValueError: it is of another model, of other groups of parameters, or has no optimizer. On every rank.
    """
    import torch.distributed.checkpoint as dcp

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"checkpoint {folder} does not exist; allowed: one that was saved to its end")
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in saved.items() if hasattr(entry, "size")}
    state = _state(model)
    for key in sorted(state.keys() ^ {key for key in shapes if key.startswith("model.")}):
        owner = "this model" if key in state else "the checkpoint"
        raise ValueError(f"checkpoint {folder} is of another model: only {owner} has {key[6:]!r}")
    for key, tensor in state.items():
        if shapes[key] != tuple(tensor.shape):
            raise ValueError(
                f"checkpoint {folder} is of another model: its {key[6:]!r} is {shapes[key]} and this model's "
                f"is {tuple(tensor.shape)}"
            )
    if optimizer is None:
        dcp.load(state, storage_reader=reader)
        return
    if _GROUPS not in saved:
        raise ValueError(f"checkpoint {folder} has no optimizer; allowed: optimizer=None")
    names, wrap = _names(model), _wrapper(model)
    named = {name: parameter for parameter, name in names.items()}
    state[_GROUPS] = None
    for key, entry in saved.items():
        if key.startswith("optimizer."):
            parameter = named[key.split(".", 1)[1].rpartition(".")[0]]
            if key not in shapes:
                state[key] = None  # a number, which will take its place
            elif shapes[key] == tuple(wrap(parameter).shape):
                state[key] = wrap(parameter, torch.empty_like(parameter, dtype=entry.properties.dtype))
            else:
                state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(state, storage_reader=reader)
    _hand_over(state, names, optimizer, folder)


def _state(model: FSDP, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Names and values, flat, and shards as DTensors: "model.<name>", "optimizer.<name>.<what>"."""
    names, wrap = _names(model), _wrapper(model)
    state: dict[str, Any] = {f"model.{name}": wrap(parameter) for parameter, name in names.items()}
    state |= {f"model.{name}": value for name, value in _buffers(model.module)}
    if optimizer is None:
        return state
    groups = [
        group | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state[_GROUPS] = pickle.dumps(groups)  # else every number in them would be an entry of its own
    for parameter, values in optimizer.state.items():
        for what, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value = wrap(parameter, value)
            elif not isinstance(value, int | float) and not (
                isinstance(value, Tensor) and value.numel() == 1
            ):
                raise ValueError(
                    f"the optimizer's {what!r} of {names[parameter]!r} has neither the parameter's shape nor "
                    "one element; allowed: optimizers that update each element by its own state"
                )
            state[f"optimizer.{names[parameter]}.{what}"] = value
    return state


def _names(model: FSDP) -> dict[nn.Parameter, str]:
    return {parameter: name.replace("_orig_mod.", "") for name, parameter in model.module.named_parameters()}


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Those that belong to the state of a module."""
    kept = module.state_dict().keys()
    return [
        (name.replace("_orig_mod.", ""), buffer) for name, buffer in module.named_buffers() if name in kept
    ]


def _wrapper(model: FSDP) -> Callable[..., Tensor]:
    """wrap(parameter, value): the value, of the parameter's shape, as the checkpoint is to see it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    shapes = model.full_shapes()
    mesh = DeviceMesh.from_group(dist.group.WORLD, next(iter(shapes)).device.type)

    def wrap(parameter: nn.Parameter, value: Tensor | None = None) -> Tensor:
        value = parameter.detach() if value is None else value
        if parameter not in shapes:
            return value
        shape = shapes[parameter]
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)

    return wrap


def _hand_over(
    state: dict[str, Any],
    names: dict[nn.Parameter, str],
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
) -> None:
    """Load an optimizer with what was read."""
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    saved_groups = pickle.loads(state[_GROUPS])
    if [group["params"] for group in saved_groups] != groups:
        raise ValueError(f"checkpoint {folder} has other groups of parameters than this optimizer")
    own = optimizer.state_dict()
    numbers = {
        name: number
        for of_names, group in zip(groups, own["param_groups"], strict=True)
        for name, number in zip(of_names, group["params"], strict=True)
    }
    loaded: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith("optimizer."):
            name, _, what = key.split(".", 1)[1].rpartition(".")
            loaded.setdefault(numbers[name], {})[what] = getattr(value, "_local_tensor", value)
    param_groups = [
        saved | {"params": group["params"]}
        for saved, group in zip(saved_groups, own["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": loaded, "param_groups": param_groups})


def _make_room(folder: Path, unfinished: Path) -> None:
    if folder.exists():
        raise FileExistsError(f"checkpoint {folder} exists; allowed: a new name for every checkpoint")
    shutil.rmtree(unfinished, ignore_errors=True)


def _on_rank_0(function: Callable[..., Any], *args: Any) -> None:
    """Call it on rank 0; the others wait until it is done, and raise what it raises."""
    outcome: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            function(*args)
        except OSError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
