"""Checkpoints of a training that FSDP shards: each rank writes its rows, and any number of ranks reads them.

To torch.distributed.checkpoint, which does it, a shard is a DTensor over the memory of the shard itself.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cs336_systems.parallel.fsdp import FSDP


def save(folder: str | Path, step: int, model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """Write the state after so many steps into a folder that all ranks reach; all ranks call it together.

    Saved are parameters, buffers, and what the optimizer keeps of each parameter; not its groups' settings.
    """
    dcp.save(_state(model, optimizer), checkpoint_id=Path(folder) / f"{step:08}")


def load(folder: str | Path, model: FSDP, optimizer: torch.optim.Optimizer) -> int:
    """Read the newest complete checkpoint; all ranks together. Returns after how many steps it was, or 0."""
    complete = Path(folder).glob("*/.metadata")  # the last file of a checkpoint to be written
    newest = [max((int(path.parent.name) for path in complete), default=0)]
    dist.broadcast_object_list(newest, src=0)
    if newest[0]:
        path = Path(folder) / f"{newest[0]:08}"
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        for name, parameter in model.module.named_parameters():
            has_state = any(key.startswith(f"{name}:") and key != f"{name}:" for key in saved)
            parameter.grad = torch.zeros_like(parameter) if has_state else None
        optimizer.step()  # makes the optimizer's state; whatever else it does is overwritten
        optimizer.zero_grad()
        dcp.load(state := _state(model, optimizer), checkpoint_id=path)
        for name, parameter in model.module.named_parameters():
            kept = optimizer.state.get(parameter, {})
            kept |= {
                key: state[f"{name}:{key}"] for key, x in kept.items() if not isinstance(x, Tensor)
            }
    return newest[0]


def _state(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    whole = {weight.parameter: weight.whole for group in model._groups for weight in group.weights}
    mesh = dist.init_device_mesh(next(iter(whole)).device.type, (dist.get_world_size(),))

    def placed(parameter: Tensor, value: Any) -> Any:
        if parameter not in whole or getattr(value, "shape", None) != parameter.shape:
            return value  # a norm, or a number of steps: the same on every rank
        shape, stride = whole[parameter].shape, whole[parameter].stride()
        return DTensor.from_local(value.detach(), mesh, [Shard(0)], shape=shape, stride=stride)

    state: dict[str, Any] = dict(model.module.named_buffers())
    for name, parameter in model.module.named_parameters():
        kept = {"": parameter} | optimizer.state.get(parameter, {})
        state |= {f"{name}:{key}": placed(parameter, value) for key, value in kept.items()}
    return state
