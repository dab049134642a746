"""What checkpoints cost. A schedule is a nested tuple of blocks; a tuple inside it is a segment.

`training.checkpointing` makes and runs schedules. Here a block may be anything but a tuple: a number will do.
"""

from typing import Any, NamedTuple

Schedule = tuple[Any, ...]


class Saved(NamedTuple):
    """Whole blocks, with everything that they save, and segments of which only the input is kept."""

    blocks: int
    inputs: int


def saved_after_forward(schedule: Schedule) -> Saved:
    """What forward leaves behind."""
    inputs = sum(isinstance(part, tuple) for part in schedule)
    return Saved(len(schedule) - inputs, inputs)


def saved_in_backward(schedule: Schedule) -> list[Saved]:
    """For every block in order: what is saved besides it while backward is at that block.

    Backward takes the parts of a schedule from the last to the first. While it is at one, the parts before it
    still hold what forward kept of them, and a segment has just been run again: it is a schedule of its own.
    """
    saved = []
    # Of the parts before.
    blocks = 0
    inputs = 0
    for part in schedule:
        if isinstance(part, tuple):
            for inner in saved_in_backward(part):
                saved.append(Saved(blocks + inner.blocks, inputs + inner.inputs))
            inputs += 1
        else:
            saved.append(Saved(blocks, inputs))
            blocks += 1
    return saved


def block_count(schedule: Schedule) -> int:
    """How many blocks a schedule runs."""
    return sum(block_count(part) if isinstance(part, tuple) else 1 for part in schedule)


def peak(schedule: Schedule, inside: float, boundary: float) -> float:
    """Most bytes saved for backward at any time, when every block of the schedule is alike.

    inside: bytes that one block saves besides its input. boundary: bytes of a block's input.
    """
    whole = inside + boundary
    saved = saved_in_backward(schedule)
    return max((blocks * whole + inputs * boundary + whole for blocks, inputs in saved), default=0)


def recomputed(schedule: Schedule) -> int:
    """How many forwards of a block backward runs again, a partial one counted whole.

    A segment is run again once for every time that the segment around it is, and once for itself. But PyTorch
    stops a rerun as soon as everything saved is there, and of a segment only the input is: so when a segment
    ends with a segment, that last one is not run again with it.
    """
    return sum(_reruns(part) for part in schedule if isinstance(part, tuple))


def _reruns(segment):
    """Block forwards in one backward through a segment: its rerun, and those of the segments inside it."""
    rerun = segment[:-1] if isinstance(segment[-1], tuple) else segment
    return block_count(rerun) + recomputed(segment)
