"""Devices and links, simulated round by round: when each device has its collective, its layer, its step.

The devices form a mesh, an array of their clocks. In a round of a collective some of them send over their
own link. A message starts when both ends have come to its round; the sender goes on when its last byte has
left, the receiver when that byte has also passed the hop. So a slow link, a slow device or one that comes
late delays exactly those who wait for it. A round is one numpy operation, and equal rounds that took every
device equally long are counted instead of repeated: 100,000 devices take seconds (not with a slow link).

Simulated here: ring (Patarasuk and Yuan 2009), recursive halving and doubling (Thakur et al. 2005), rings on
every axis of a torus (Jouppi et al. 2023), and the ring that passes whole tensors on.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from cs336_systems.arguments import check_choice

SIMULATED = ("all_reduce", "all_gather", "reduce_scatter")
ALGORITHMS = ("ring", "whole_ring", "halving", "torus")


@dataclass(frozen=True)
class Links:
    """What every device can send along one axis of a mesh.

    Attributes:
        bytes_per_s: of a device's links along the axis, in one direction or, of both, together; a number, or
            an array that broadcasts to the mesh: one smaller entry is a slow link.
        hop_s: latency of a message, number or array.
        directions: 1, or 2: a ring then sends both ways, each part only half way around.
    """

    bytes_per_s: float | np.ndarray
    hop_s: float | np.ndarray = 0.0
    directions: int = 1

    def __post_init__(self) -> None:
        if not np.all(np.asarray(self.bytes_per_s) > 0):
            raise ValueError(f"bytes_per_s is {np.min(self.bytes_per_s):g}; allowed: above 0")
        if not np.all(np.asarray(self.hop_s) >= 0):
            raise ValueError(f"hop_s is {np.min(self.hop_s):g}; allowed: 0 or more")
        check_choice("directions", self.directions, (1, 2))


def collective_finish(
    collective: str, message_bytes: float, mesh: Sequence[int], links: Links | Sequence[Links], *,
    axis: int = 0, algorithm: str = "ring", ready: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Seconds at which each device of a mesh is done with a collective, an array of the mesh's shape.

    Args:
        collective: one of SIMULATED; message_bytes: the largest buffer on a device.
        mesh: devices along each axis.
        links: of every axis; those of one axis may stand alone.
        axis: along which it runs, in every line of the mesh at once.
        algorithm: "ring", "whole_ring" (all-reduce alone), "halving" (then doubling) on a switch, or "torus":
            rings on all axes at once, the message split so that a part starts on each.
        ready: seconds at which each device joins; 0 for all by default.
    """
    check_choice("collective", collective, SIMULATED)
    check_choice("algorithm", algorithm, ALGORITHMS)
    mesh, links = _checked_mesh(mesh, links)
    if not message_bytes >= 0:
        raise ValueError(f"message_bytes is {message_bytes:g}; allowed: 0 or more")
    if algorithm == "whole_ring" and collective != "all_reduce":
        raise ValueError(f"collective {collective!r} is not for {algorithm!r}; allowed: all_reduce")
    clocks = np.zeros(mesh) if ready is None else np.array(ready, float)
    if clocks.shape != mesh:
        raise ValueError(f"ready has the shape {clocks.shape}; allowed: {mesh}, that of the mesh")
    if algorithm == "torus":
        tasks = _torus_tasks(collective, message_bytes, mesh)
        ends = [end for _, end in _timeline(tasks, mesh, links, 1.0, clocks).values()]
        return np.max(ends, axis=0)
    check_choice("axis", axis, range(len(mesh)))
    devices, along = mesh[axis], links[axis]
    phases = {"ring": _ring, "whole_ring": _whole_ring, "halving": _halving}[algorithm]
    for way_rounds in phases(collective, message_bytes, devices, along.directions):
        # The directions of a ring share nothing but their start and their end.
        share = replace(along, bytes_per_s=along.bytes_per_s / len(way_rounds))
        clocks = np.max([_run(clocks, rounds, share, axis) for rounds in way_rounds], axis=0)
    return clocks


def _checked_mesh(mesh: Sequence[int], links: Links | Sequence[Links]) -> tuple[tuple, tuple]:
    for devices in mesh:
        if not isinstance(devices, int | np.integer) or isinstance(devices, bool) or devices < 1:
            raise ValueError(f"devices along an axis is {devices!r}; allowed: a whole number, 1 or more")
    links = (links,) if isinstance(links, Links) else tuple(links)
    if not mesh or len(links) != len(mesh):
        raise ValueError(f"links of {len(links)} axes for a mesh of {len(mesh)}; allowed: as many, 1 or more")
    return tuple(map(int, mesh)), links


@dataclass(frozen=True)
class _Round:
    """Positions along an axis that send and those that receive it; `times` such rounds follow each other."""

    senders: np.ndarray
    receivers: np.ndarray
    size: float
    times: int = 1


# What an algorithm yields: phases one after the other, in each the rounds of every direction.
Phases = Iterator[list[list[_Round]]]


def _ring(collective: str, size: float, devices: int, directions: int) -> Phases:
    everyone, part = np.arange(devices), size / devices
    ways = []
    for way in (1, -1)[:directions]:
        target = (everyone + way) % devices
        rounds = [_Round(everyone, target, part, (devices - 1) // directions)]
        if directions == 2 and devices % 2 == 0:  # the part of the device opposite comes half from each side
            rounds.append(_Round(everyone, target, part / 2))
        ways.append(rounds)
    yield from [ways] * (2 if collective == "all_reduce" else 1)


def _whole_ring(collective: str, size: float, devices: int, directions: int) -> Phases:
    everyone = np.arange(devices)
    yield [[_Round(everyone, (everyone + 1) % devices, size, devices - 1)]]


def _halving(collective: str, size: float, devices: int, directions: int) -> Phases:
    if devices & (devices - 1):
        raise ValueError(f"devices for 'halving' is {devices}; allowed: powers of 2")
    everyone, part = np.arange(devices), size / devices
    doubling = [
        _Round(everyone, everyone ^ 1 << bit, part * 2**bit) for bit in range(devices.bit_length() - 1)
    ]
    if collective != "all_gather":
        yield [doubling[::-1]]
    if collective != "reduce_scatter":
        yield [doubling]


def _run(clocks: np.ndarray, rounds: Iterable[_Round], links: Links, axis: int) -> np.ndarray:
    rate, hop, clocks = (
        np.moveaxis(np.broadcast_to(values, clocks.shape), axis, 0)
        for values in (links.bytes_per_s, links.hop_s, clocks)
    )
    for each in rounds:
        sending, passing = each.size / rate[each.senders], hop[each.senders]
        for done in range(1, each.times + 1):
            left = np.maximum(clocks[each.senders], clocks[each.receivers]) + sending
            later = clocks.copy()
            later[each.senders] = left
            later[each.receivers] = np.maximum(later[each.receivers], left + passing)
            took, clocks = later - clocks, later
            if done < each.times and (took == took.flat[0]).all():  # then so will all that follow
                clocks = clocks + (each.times - done) * took
                break
    return np.moveaxis(clocks, 0, axis)


@dataclass(frozen=True)
class Task:
    """A piece of a step: computing for some seconds, or a collective.

    Attributes:
        name: told apart by it.
        lane: tasks of one lane run in their order: "compute", or what shares links, as "x" and "y".
        seconds: of computing, without a collective.
        collective, message_bytes, axis, algorithm: as in `collective_finish`.
        after: names of tasks listed before it that it waits for.
    """

    name: str
    lane: str
    seconds: float = 0.0
    collective: str | None = None
    message_bytes: float = 0.0
    axis: int = 0
    algorithm: str = "ring"
    after: tuple[str, ...] = ()


Timeline = dict[str, tuple[np.ndarray, np.ndarray]]


def run_tasks(
    tasks: Sequence[Task], mesh: Sequence[int], links: Links | Sequence[Links], *,
    slowness: float | np.ndarray = 1.0,
) -> Timeline:  # fmt: skip
    """Start and end of every task on every device, in seconds: arrays of the mesh's shape, by task.

    Args:
        slowness: what a device's seconds of computing are multiplied by; an array with one larger entry has
            one slow device.
    """
    mesh, links = _checked_mesh(mesh, links)
    if not np.all(np.asarray(slowness) > 0):
        raise ValueError(f"slowness is {np.min(slowness):g}; allowed: above 0")
    return _timeline(tasks, mesh, links, slowness, np.zeros(mesh))


def _timeline(
    tasks: Iterable[Task], mesh: tuple, links: tuple, slowness: float | np.ndarray, begin: np.ndarray
) -> Timeline:
    timeline: Timeline = {}
    free: dict[str, np.ndarray] = {}
    for task in tasks:
        start = np.max([free.get(task.lane, begin), *(timeline[name][1] for name in task.after)], axis=0)
        if task.collective:
            how = {"axis": task.axis, "algorithm": task.algorithm, "ready": start}
            end = collective_finish(task.collective, task.message_bytes, mesh, links, **how)
        else:
            end = start + task.seconds * slowness
        timeline[task.name] = start, end
        free[task.lane] = end
    return timeline


def _torus_tasks(collective: str, size: float, mesh: tuple[int, ...]) -> list[Task]:
    """A part of the message for each axis to start on; each goes on to the next with what is left to sum."""
    axes = range(len(mesh))
    phases = [("reduce_scatter", turn) for turn in axes] + [("all_gather", turn) for turn in reversed(axes)]
    tasks = []
    for phase, (kind, turn) in enumerate(each for each in phases if collective in ("all_reduce", each[0])):
        for part in axes:
            axis = (part + turn) % len(mesh)
            share = size / len(mesh) / math.prod((mesh[part:] + mesh[:part])[:turn])
            after = (f"{phase - 1}, {part}",) if phase else ()
            tasks.append(Task(f"{phase}, {part}", f"axis {axis}", 0.0, kind, share, axis, "ring", after))
    return tasks


def spans(timeline: Timeline, tasks: Sequence[Task], device: int | tuple[int, ...] = 0) -> pd.DataFrame:
    """What one device does when, for `report.overlap_timeline`: lane, range (first word of the name), ms."""
    return pd.DataFrame(
        {
            "lane": "communication" if task.collective else "compute",
            "range": "communication" if task.collective else task.name.split()[0],
            "start_ms": 1e3 * timeline[task.name][0][device],
            "end_ms": 1e3 * timeline[task.name][1][device],
        }
        for task in tasks
    )
