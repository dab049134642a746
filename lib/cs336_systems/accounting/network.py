"""Devices and links, simulated round by round: when each device has its collective.

The devices form a mesh, an array of their clocks. In a round of a collective each sends over its own link to
the next one along an axis. A message starts when both ends have come to its round; the sender goes on when
its last byte has left, the receiver when that byte has also passed the hop. So a slow link, a slow device or
one that comes late delays exactly those who wait for it. A round is one numpy operation, and equal rounds
that took every device equally long are counted instead of repeated: 100,000 devices take seconds (not with a
slow link). Collectives run around rings (Patarasuk and Yuan 2009).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cs336_systems.arguments import check_choice

SIMULATED = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Links:
    """What every device can send along one axis of a mesh.

    Attributes:
        bytes_per_s: of a device's links along the axis; a number, or an array that broadcasts to the mesh:
            one smaller entry is a slow link.
        hop_s: latency of a message, number or array.
    """

    bytes_per_s: float | np.ndarray
    hop_s: float | np.ndarray = 0.0

    def __post_init__(self) -> None:
        if not np.all(np.asarray(self.bytes_per_s) > 0):
            raise ValueError(f"bytes_per_s is {np.min(self.bytes_per_s):g}; allowed: above 0")
        if not np.all(np.asarray(self.hop_s) >= 0):
            raise ValueError(f"hop_s is {np.min(self.hop_s):g}; allowed: 0 or more")


def collective_finish(
    collective: str, message_bytes: float, mesh: Sequence[int], links: Links | Sequence[Links], *,
    axis: int = 0, ready: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Seconds at which each device of a mesh is done with a collective, an array of the mesh's shape.

    Args:
        collective: one of SIMULATED; message_bytes: the largest buffer on a device.
        mesh: devices along each axis.
        links: of every axis; those of one axis may stand alone.
        axis: along which it runs, in every line of the mesh at once.
        ready: seconds at which each device joins; 0 for all by default.
    """
    check_choice("collective", collective, SIMULATED)
    mesh, links = _checked_mesh(mesh, links)
    if not message_bytes >= 0:
        raise ValueError(f"message_bytes is {message_bytes:g}; allowed: 0 or more")
    clocks = np.zeros(mesh) if ready is None else np.array(ready, float)
    if clocks.shape != mesh:
        raise ValueError(f"ready has the shape {clocks.shape}; allowed: {mesh}, that of the mesh")
    check_choice("axis", axis, range(len(mesh)))
    for _ in range(2 if collective == "all_reduce" else 1):
        clocks = _rounds(clocks, message_bytes / mesh[axis], mesh[axis] - 1, links[axis], axis)
    return clocks


def _checked_mesh(mesh: Sequence[int], links: Links | Sequence[Links]) -> tuple[tuple, tuple]:
    for devices in mesh:
        is_whole = isinstance(devices, int | np.integer) and not isinstance(devices, bool)
        if not is_whole or devices < 1:
            raise ValueError(
                f"devices along an axis is {devices!r}; allowed: a whole number, 1 or more"
            )
    links = (links,) if isinstance(links, Links) else tuple(links)
    if not mesh or len(links) != len(mesh):
        counts = f"links of {len(links)} axes for a mesh of {len(mesh)}"
        raise ValueError(f"{counts}; allowed: as many, 1 or more")
    return tuple(map(int, mesh)), links


def _rounds(clocks: np.ndarray, size: float, times: int, links: Links, axis: int) -> np.ndarray:
    """The clocks after so many rounds in which every device sends `size` bytes to the next along the axis."""
    sending = size / np.broadcast_to(links.bytes_per_s, clocks.shape)
    for done in range(1, times + 1):
        left = np.maximum(clocks, np.roll(clocks, -1, axis)) + sending
        took = np.maximum(left, np.roll(left + links.hop_s, 1, axis)) - clocks
        clocks = clocks + took
        # Then so will all that follow.
        if (took == took.flat[0]).all():
            return clocks + (times - done) * took
    return clocks
