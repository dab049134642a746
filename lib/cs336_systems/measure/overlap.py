"""Who worked when in a step: a lane for computing, one for communicating, and how far one hides the other.

Communication is *exposed* while it runs and nothing is computed: that is what it adds to the step. The rest
is hidden behind computing, and free. A communication kernel also runs while it waits for its peer.
"""

import pandas as pd

from cs336_systems.measure.profile import Profile, one_step, stages

LANES = ("compute", "communication")


def step_lanes(profile: Profile, number: int = -1, root: str = "measure") -> pd.DataFrame:
    """The spans of one step: lane (one of LANES), range (the stage that launched it), start_ms, end_ms.

    Milliseconds since the step began, one row a kernel. Raises ProfileError where there is no such step.
    """
    _, kernels = one_step(profile, number, root)
    is_communication = kernels["class"] == "communication"
    lanes = pd.DataFrame(
        {
            "lane": is_communication.map({True: "communication", False: "compute"}),
            "range": stages(kernels),
            "start_ms": kernels.start_ms,
            "end_ms": kernels.end_ms,
        }
    )
    return lanes.sort_values(["start_ms", "end_ms"], ignore_index=True)


def covered(spans: pd.DataFrame) -> pd.DataFrame:
    """The union of spans that may overlap: start_ms and end_ms, disjoint and rising."""
    union: list[list[float]] = []
    for start, end in sorted(zip(spans.start_ms, spans.end_ms, strict=True)):
        if union and start <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([start, end])
    return pd.DataFrame(union, columns=["start_ms", "end_ms"], dtype=float)


def exposed(lanes: pd.DataFrame) -> pd.DataFrame:
    """The stretches with communication and no computing: start_ms and end_ms."""
    by_lane = [covered(lanes[lanes.lane == lane]) for lane in LANES]
    changes = [
        (time, change * weight)
        for spans, weight in zip(by_lane, (1, 2), strict=True)
        for column, change in (("start_ms", 1), ("end_ms", -1))
        for time in spans[column]
    ]
    stretches, state, since = [], 0, 0.0
    for time, change in sorted(changes):
        if state == 2 and time > since:  # communication alone
            stretches.append((since, time))
        state, since = state + change, time
    return covered(pd.DataFrame(stretches, columns=["start_ms", "end_ms"], dtype=float))


def overlap(lanes: pd.DataFrame) -> dict[str, float | None]:
    """Value columns: time with communication, the part of it that is exposed, and the share that is not.

    The tail is the time from the end of backward to that of communication: what DDP adds to a step. Exposed
    are also the moments between two kernels of backward, in which nobody could have computed.
    """
    communication, alone = (
        float((spans.end_ms - spans.start_ms).sum())
        for spans in (covered(lanes[lanes.lane == "communication"]), exposed(lanes))
    )
    return {
        "profiled_communication_ms": communication,
        "profiled_exposed_ms": alone,
        "profiled_tail_ms": _tail_ms(lanes),
        "overlap_share": 1 - alone / communication if communication else None,
    }


def _tail_ms(lanes: pd.DataFrame) -> float | None:
    """None where nothing is communicated, or the step has no backward."""
    computed = lanes[(lanes.lane == "compute") & (lanes.range == "backward")]
    sent = lanes[lanes.lane == "communication"]
    return float(max(0.0, sent.end_ms.max() - computed.end_ms.max())) if len(computed) and len(sent) else None


def merged(lanes: pd.DataFrame, gap_ms: float = 0.02) -> pd.DataFrame:
    """The same lanes in fewer spans: neighbours of one lane and stage with hardly a gap become one."""
    parts = []
    for lane in LANES:
        spans = lanes[lanes.lane == lane].sort_values("start_ms")
        reached = spans.end_ms.cummax().shift()
        begins = (spans.start_ms > reached + gap_ms) | (spans.range != spans.range.shift()) | reached.isna()
        parts.append(
            spans.groupby(begins.cumsum()).agg(
                lane=("lane", "first"),
                range=("range", "first"),
                start_ms=("start_ms", "min"),
                end_ms=("end_ms", "max"),
            )
        )
    return pd.concat(parts, ignore_index=True)
