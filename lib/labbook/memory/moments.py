"""What a process of a training holds at a few moments, by category: around its first update, at a peak."""

import torch

from labbook.memory.history import CATEGORIES, owners_of, record_memory, stage_peaks
from labbook.memory.operations import storage_bytes, tensors_of_python
from labbook.timing import MIB

Held = dict[str, float]
_LASTING = CATEGORIES[:3]  # what a training keeps from step to step


def held_in_first_step(steps) -> dict[str, Held]:
    """Bytes held when it is "initialised", and "before step" and "after step" of the optimizer.

    steps: as for `record_memory`, and a training step in parts: forward_backward(), communicate(), update().
    """
    held = {"initialised": held_now(steps)}
    steps.forward_backward()
    steps.communicate()
    held["before step"] = held_now(steps)
    steps.update()
    held["after step"] = held_now(steps)
    return held


def held_at_peak(steps) -> Held:
    """Bytes held at the peak of one more step, with every allocation recorded."""
    # Gradients that are there when the step begins would count as what others hold.
    steps.model.zero_grad(set_to_none=True)
    # A CPU's trace tells of no tensor that is older than itself.
    others = owners_of({"other": tensors_of_python()}) if steps.device.type == "cpu" else None
    stages = stage_peaks(record_memory(steps, "train_step", others=others))
    peak = stages.loc[stages.total.idxmax()]
    held = (peak[_LASTING] * MIB).to_dict()
    held["rest"] = peak.total * MIB - sum(held.values())
    return held


def held_now(steps) -> Held:
    """Bytes of each category; the rest is what else the GPU's allocator gave out, or Python can find."""
    held = {category: storage_bytes(tensors) for category, tensors in steps.tensors().items()}
    if steps.device.type == "cuda":
        torch.cuda.synchronize(steps.device)
        total = torch.cuda.memory_stats(steps.device)["requested_bytes.all.current"]
    else:
        total = storage_bytes(tensors_of_python())
    return held | {"rest": total - sum(held.values())}
