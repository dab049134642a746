"""What activation checkpointing costs. A plan is a nested tuple of blocks; a tuple inside it is a segment.

`training.checkpointing` makes and runs plans. Here a block may be anything but a tuple: a number will do.
"""

from typing import Any, NamedTuple

Plan = tuple[Any, ...]


class Saved(NamedTuple):
    """Whole blocks, with everything that they save, and segments of which only the input is kept."""

    blocks: int
    inputs: int


def saved_after_forward(plan: Plan) -> Saved:
    """What forward leaves behind."""
    inputs = sum(isinstance(part, tuple) for part in plan)
    return Saved(len(plan) - inputs, inputs)


def saved_in_backward(plan: Plan) -> list[Saved]:
    """For every block in order: what is saved besides it while backward is at that block.

    Backward takes the parts of a plan from the last to the first. While it is at one, the parts before it
    still hold what forward kept of them, and a segment has just been run again: it is a plan of its own.
    """
    found, blocks, inputs = [], 0, 0  # of the parts before
    for part in plan:
        if isinstance(part, tuple):
            found += [
                Saved(blocks + inner.blocks, inputs + inner.inputs)
                for inner in saved_in_backward(part)
            ]
            inputs += 1
        else:
            found.append(Saved(blocks, inputs))
            blocks += 1
    return found


def block_count(plan: Plan) -> int:
    """How many blocks a plan runs."""
    return sum(block_count(part) if isinstance(part, tuple) else 1 for part in plan)


def peak(plan: Plan, inside: float, boundary: float) -> float:
    """Most bytes saved for backward at any time, when every block of the plan is alike.

    inside: bytes that one block saves besides its input. boundary: bytes of a block's input.
    """
    whole = inside + boundary
    saved = saved_in_backward(plan)
    return max((blocks * whole + inputs * boundary + whole for blocks, inputs in saved), default=0)


def recomputed(plan: Plan) -> int:
    """How many forwards of a block backward runs again, a partial one counted whole.

    A segment is run again once for every time that the segment around it is, and once for itself. But PyTorch
    stops a rerun as soon as everything saved is there, and of a segment only the input is: so when a segment
    ends with a segment, that last one is not run again with it.
    """
    return sum(_reruns(part) for part in plan if isinstance(part, tuple))


def _reruns(segment: Plan) -> int:
    """Block forwards in one backward through a segment: its rerun, and those of the segments inside it."""
    last = segment[-1]
    skipped = block_count(last) if isinstance(last, tuple) else 0
    return block_count(segment) - skipped + recomputed(segment)


def best_k(count: int, inside: float, boundary: float) -> int:
    """The segment length with the lowest peak for `count` equal blocks, without nesting."""
    lengths = range(1, count + 1)
    plans = {
        k: tuple((0,) * min(k, count - first) for first in range(0, count, k)) for k in lengths
    }
    return min(lengths, key=lambda k: peak(plans[k], inside, boundary))
