"""What a plan of checkpoints holds: a nested tuple of blocks, where a tuple inside is a checkpointed segment.

`cs336_systems.training.checkpointing` has plans that run. Here a block may be anything but a tuple: a number will do.
"""

from typing import Any, NamedTuple

Plan = tuple[Any, ...]


class Held(NamedTuple):
    """Whole blocks, with everything that they save, and segments of which only the input is kept."""

    blocks: int
    inputs: int


def held_after_forward(plan: Plan) -> Held:
    """What forward leaves behind."""
    inputs = sum(isinstance(part, tuple) for part in plan)
    return Held(len(plan) - inputs, inputs)


def held_in_backward(plan: Plan) -> list[Held]:
    """For every block in order: what is held besides it while backward is at that block.

    Backward takes the parts of a plan from the last to the first. While it is at one, the parts before it
    still hold what forward kept of them, and a segment has just been run again: it is a plan of its own.
    """
    found, blocks, inputs = [], 0, 0  # of the parts before
    for part in plan:
        if isinstance(part, tuple):
            found += [Held(blocks + held.blocks, inputs + held.inputs) for held in held_in_backward(part)]
            inputs += 1
        else:
            found.append(Held(blocks, inputs))
            blocks += 1
    return found
