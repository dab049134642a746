"""Who worked when in a step: a lane for computing, one for communicating, and how far one hides the other.

Communication is *exposed* while it runs and nothing is computing: that is what it adds to the step. The rest
is hidden behind computing, and free. A communication kernel also runs while it waits for its peer.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch.distributed as dist
from torch.profiler import record_function

from labbook.profiles.table import STEP, Profile, covered, covered_ms, one_step, stages
from labbook.profiles.torch_trace import record_trace
from labbook.ranks import Context
from labbook.timing import wait_for

_TIMES = ["start_ms", "end_ms"]


def record_steps(step: Callable, context: Context) -> Profile:
    """Two steps of this rank under torch.profiler, each in a range `measure`; the first warms it up.

    All ranks call it together, and start each step together. Turn named ranges on around it.
    """

    def two_steps():
        for _ in range(2):
            dist.barrier()
            wait_for(context.device)
            with record_function(STEP):
                step()
                wait_for(context.device)

    with tempfile.TemporaryDirectory() as folder:
        return record_trace(two_steps, Path(folder, "trace.json"), device=context.device)


def step_lanes(profile: Profile) -> pd.DataFrame:
    """The spans of the last step: lane, range (the stage that launched it), start_ms, end_ms.

    The lanes are "compute" and "communication"; milliseconds since the step began, one row a kernel.
    Raises ProfileError where there is no step.
    """
    _, kernels, _ = one_step(profile)
    lanes = np.where(kernels["class"] == "communication", "communication", "compute")
    spans = kernels.assign(lane=lanes, range=stages(kernels))
    return spans.sort_values(_TIMES, ignore_index=True)[["lane", "range"] + _TIMES]


def exposed(lanes: pd.DataFrame) -> pd.DataFrame:
    """The stretches with communication and no computing: start_ms and end_ms."""
    communication = covered(lanes[lanes.lane == "communication"])
    computing = covered(lanes[lanes.lane == "compute"])
    gap_start_ms = np.append(-np.inf, computing.end_ms)
    gap_end_ms = np.append(computing.start_ms, np.inf)
    # Each stretch of communication within each gap of computing, if they meet.
    start_ms = np.maximum.outer(communication.start_ms.to_numpy(), gap_start_ms)
    end_ms = np.minimum.outer(communication.end_ms.to_numpy(), gap_end_ms)
    meet = start_ms < end_ms
    return covered(pd.DataFrame({"start_ms": start_ms[meet], "end_ms": end_ms[meet]}))


def overlap_values(lanes: pd.DataFrame) -> dict[str, float | None]:
    """Value columns: time with communication, the part of it that is exposed, and the share that is not.

    The tail is the time from the end of backward to that of communication: what DDP adds to a step. Exposed
    are also the moments between two kernels of backward, in which nobody could have computed. The tail is
    None where nothing is communicated, or the step has no backward.
    """
    communication = lanes[lanes.lane == "communication"]
    backward = lanes[(lanes.lane == "compute") & (lanes.range == "backward")]
    communication_ms = covered_ms(communication)
    exposed_ms = covered_ms(exposed(lanes))
    tail_ms = None
    if len(communication) and len(backward):
        tail_ms = float(max(0, communication.end_ms.max() - backward.end_ms.max()))
    return {
        "profiled_communication_ms": communication_ms,
        "profiled_exposed_ms": exposed_ms,
        "profiled_tail_ms": tail_ms,
        "overlap_share": 1 - exposed_ms / communication_ms if communication_ms else None,
    }


def lane_rows(lanes: pd.DataFrame, key: Mapping, gap_ms: float = 0.1) -> list[dict]:
    """Lanes as rows, few enough to keep: gaps under `gap_ms` in a lane and stage closed.

    Their times, in milliseconds, are to the microsecond.
    """
    rows = []
    for lane, spans in lanes.sort_values("start_ms").groupby("lane", sort=False):
        turn = (spans.range != spans.range.shift()).cumsum().rename("turn")  # a stage may come back
        turns = spans.groupby([turn, spans.range], sort=False)
        closed = turns[_TIMES].apply(covered, gap_ms).reset_index("range").round(3)
        closed = closed.assign(**key, lane=lane, span=range(len(closed)))
        rows += closed.to_dict("records")
    return rows


def activity_spans(lanes: pd.DataFrame, by: str) -> pd.DataFrame:
    """Lanes of several steps for `plots.spans`: `doing` is a stage, or "communication, hidden" or "exposed".

    by: column that tells the steps apart. Copies to and from one long tensor are launched by the stage that
    communicates.
    """
    computing = lanes[lanes.lane == "compute"]
    stage = computing.range.replace({"communication": "copies"})
    parts = [computing.assign(doing=stage)]
    for step, of_step in lanes.groupby(by, sort=False):
        hidden = covered(of_step[of_step.lane == "communication"])
        for name, spans in (("hidden", hidden), ("exposed", exposed(of_step))):
            spans = spans.assign(lane="communication", doing=f"communication, {name}")
            spans[by] = step
            parts.append(spans)
    return pd.concat(parts, ignore_index=True)
