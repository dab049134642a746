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
        ValueError: the optimizer's state is not of that kind, or of another model's parameters.
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
    state = _state(model)
    _check_model(folder, state, saved)
    if optimizer is None:
        dcp.load(state, storage_reader=reader)
        return
    if _GROUPS not in saved:
        raise ValueError(f"checkpoint {folder} has no optimizer; allowed: optimizer=None")
    names = _names(model)
    groups: dict[str, Any] = {_GROUPS: None}
    dcp.load(groups, storage_reader=reader)
    groups = pickle.loads(groups[_GROUPS])
    if [group["params"] for group in groups] != _group_names(optimizer, names):
        raise ValueError(f"checkpoint {folder} has other groups of parameters than this optimizer")
    places = _places_for_optimizer(model, saved)
    dcp.load(state | places, storage_reader=reader)
    _hand_over(places, groups, optimizer)


def _check_model(folder: str | Path, state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse a checkpoint that has other parameters or buffers."""
    shapes = {key: tuple(entry.size) for key, entry in saved.items() if key.startswith("model.")}
    for key in sorted(state.keys() ^ shapes.keys()):
        owner = "this model" if key in state else "the checkpoint"
        raise ValueError(f"checkpoint {folder} is of another model: only {owner} has {key[6:]!r}")
    for key, tensor in state.items():
        if shapes[key] != tuple(tensor.shape):
            raise ValueError(
                f"checkpoint {folder} is of another model: its {key[6:]!r} is {shapes[key]} and this model's "
                f"is {tuple(tensor.shape)}"
            )


def _places_for_optimizer(model: FSDP, saved: dict[str, Any]) -> dict[str, Any]:
    """For each entry of the optimizer's state, what it is to be read into: this rank's rows, or all of it."""
    wrap, places = _wrapper(model), {}
    named = {name: parameter for parameter, name in _names(model).items()}
    for key, entry in saved.items():
        if key.startswith("optimizer."):
            parameter = named[_owner(key)[0]]
            if not hasattr(entry, "size"):
                places[key] = None  # a number, which will take its place
            elif tuple(entry.size) == tuple(wrap(parameter).shape):
                places[key] = wrap(parameter, torch.empty_like(parameter, dtype=entry.properties.dtype))
            else:
                places[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return places


def _owner(key: str) -> tuple[str, str]:
    """ "optimizer.layers.0.weight.exp_avg" -> ("layers.0.weight", "exp_avg")"""
    name, _, what = key.removeprefix("optimizer.").rpartition(".")
    return name, what


def _state(model: FSDP, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Names and values, flat, and shards as DTensors: "model.<name>", "optimizer.<name>.<what>"."""
    names, wrap = _names(model), _wrapper(model)
    state: dict[str, Any] = {f"model.{name}": wrap(parameter) for parameter, name in names.items()}
    state |= {f"model.{name}": value for name, value in _buffers(model.module)}
    if optimizer is None:
        return state
    groups = [
        group | {"params": of_names}
        for group, of_names in zip(optimizer.param_groups, _group_names(optimizer, names), strict=True)
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


def _group_names(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> list[list[str]]:
    """The names of its parameters, group by group."""
    if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer holds a parameter that the model has not; allowed: the model's")
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


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


def _hand_over(read: dict[str, Any], groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer its state and settings as a state dict, which numbers the parameters."""
    numbered = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    numbers = {
        name: number
        for group, of_group in zip(groups, numbered, strict=True)
        for name, number in zip(group["params"], of_group, strict=True)
    }
    state: dict[int, dict[str, Any]] = {}
    for key, value in read.items():
        name, what = _owner(key)
        state.setdefault(numbers[name], {})[what] = getattr(value, "_local_tensor", value)
    settings = [group | {"params": of_group} for group, of_group in zip(groups, numbered, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": settings})


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
