"""The optimisation ladder as a table: what each technique was predicted to gain, and what it gained."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pandas as pd


class Technique(Protocol):
    """What a line needs to know; gain is the time before over the time after, predicted: from, to."""

    name: str
    gain: tuple[float, float]
    kept: bool


def climbed(
    times_ms: pd.Series,
    first: str,
    techniques: Sequence[Technique],
    failures: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """A line for the first version and for every technique, in order.

    Args:
        times_ms: by the name of the version.
        first: the name of the first version.
        techniques: each is compared with the last one kept before it.
        failures: why a version has no time, by its name.

    Returns:
        rung (of those kept), technique, time_ms, predicted_gain (text), gain, outcome (beside it), kept.
    """
    before, rung = times_ms.get(first, math.nan), 0
    lines: list[dict[str, Any]] = [{"rung": "0", "technique": first, "time_ms": before}]
    for technique in techniques:
        rung += technique.kept
        time = times_ms.get(technique.name, math.nan)
        lines.append(
            {
                "rung": str(rung) if technique.kept else "",
                "technique": technique.name,
                "time_ms": time,
                "predicted_gain": "{:.2f} to {:.2f}".format(*technique.gain),
                "gain": before / time,
                "outcome": (failures or {}).get(technique.name) or outcome(before / time, technique.gain),
                "kept": "kept" if technique.kept else "dropped",
            }
        )
        before = time if technique.kept and not math.isnan(time) else before
    return pd.DataFrame(lines)


def outcome(gain: float, predicted: tuple[float, float], tolerance: float = 0.01) -> str:
    """How a gain compares with its prediction, to a hundredth."""
    if math.isnan(gain):
        return "not measured"
    if gain < predicted[0] - tolerance:
        return "a loss" if gain < 1 - tolerance else "less"
    return "more" if gain > predicted[1] + tolerance else "as predicted"
