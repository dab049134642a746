"""A step as Nsight Systems shows it: ranges and CUDA calls of the host, kernels of the GPU, on one axis."""

from typing import Any

import pandas as pd

from cs336_systems.measure.profile import Profile, one_step, stages, step_calls, union

_CALLS = {"launch": "Launch", "wait": "Synchronize"}  # by a part of their names
_DEEPEST = 2  # ranges: the step, its stages, what is right inside them
_FINEST = 1 / 2000  # of the step: a gap that no picture shows


def nsys_timeline(profile: Profile) -> list[dict[str, Any]]:
    """The last step as rows of the table "nsys_timeline": lane, span, event, depth, start_ms, end_ms.

    The event is: in the lane "NVTX" a range, with its depth; in "CUDA API" what a call does, "launch", "wait"
    or "other call"; in "kernels" the stage that launched them. Spans of one event with hardly a gap are one.

    Raises:
        ProfileError: there is no step.
    """
    ranges, kernels = one_step(profile)
    ranges = ranges[ranges.depth <= _DEEPEST].rename(columns={"name": "event"})
    calls = step_calls(profile)
    finest_ms = _FINEST * max(ranges.end_ms.max(), kernels.end_ms.max())
    lanes = {
        "NVTX": ranges.sort_values("start_ms", ignore_index=True),
        "CUDA API": _merged(calls.assign(event=calls.name.map(_kind)), finest_ms),
        "kernels": _merged(kernels.assign(event=stages(kernels)), finest_ms),
    }
    rows = pd.concat(lanes, names=["lane", "span"]).reset_index()
    return rows.round({"start_ms": 4, "end_ms": 4}).to_dict("records")


def _kind(call: str) -> str:
    return next((kind for kind, part in _CALLS.items() if part in call), "other call")


def _merged(spans: pd.DataFrame, gap_ms: float) -> pd.DataFrame:
    """The spans of each event, those less than `gap_ms` apart as one."""
    found = [
        (event, start, end - gap_ms)
        for event, own in spans.groupby("event")
        for start, end in union(zip(own.start_ms, own.end_ms + gap_ms, strict=True))
    ]
    return pd.DataFrame(found, columns=["event", "start_ms", "end_ms"]).sort_values(
        "start_ms", ignore_index=True
    )
