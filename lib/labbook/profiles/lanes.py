"""Who worked when in a step: a lane for computing, one for communicating, and how far one hides the other.

Communication is *exposed* while it runs and nothing is computed: that is what it adds to the step. The rest
is hidden behind computing, and free. A communication kernel also runs while it waits for its peer.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch.distributed as dist
from torch.profiler import record_function

from labbook.profiles.table import STEP, Profile, covered, one_step, stages
from labbook.profiles.torch_trace import record_trace
from labbook.ranks import Context
from labbook.timing import wait_for

LANES = ("compute", "communication")
_TIMES = ["start_ms", "end_ms"]


def record_steps(step: Callable[[], None], context: Context) -> Profile:
    """Two steps of this rank under torch.profiler, each in a range `measure`; the first warms it up.

    All ranks call it together, and start each step together. Turn named ranges on around it.
    """

    def two_steps() -> None:
        for _ in range(2):
            dist.barrier()
            wait_for(context.device)
            with record_function(STEP):
                step()
                wait_for(context.device)

    with tempfile.TemporaryDirectory(prefix="labbook-lanes-") as folder:
        return record_trace(two_steps, Path(folder, "trace.json"), device=context.device)


def step_lanes(profile: Profile) -> pd.DataFrame:
    """The spans of the last step: lane (one of LANES), range (the stage that launched it), start_ms, end_ms.

    Milliseconds since the step began, one row a kernel. Raises ProfileError where there is no step.
    """
    _, kernels, _ = one_step(profile)
    lanes = np.where(kernels["class"] == "communication", "communication", "compute")
    spans = kernels.assign(lane=lanes, range=stages(kernels)).sort_values(_TIMES, ignore_index=True)
    return spans[["lane", "range", *_TIMES]]


def exposed(lanes: pd.DataFrame) -> pd.DataFrame:
    """The stretches with communication and no computing: start_ms and end_ms."""
    edges = lanes.melt("lane", _TIMES, "edge", "at")
    edges["change"] = np.where(edges.edge == "start_ms", 1, -1)
    running = (
        edges.pivot_table("change", "at", "lane", "sum").reindex(columns=LANES).fillna(0).cumsum()
    )
    start_ms = running.index.to_series()
    stretches = pd.DataFrame({"start_ms": start_ms, "end_ms": start_ms.shift(-1)})
    return covered(stretches[running.communication.gt(0) & running.compute.eq(0)])


def overlap_values(lanes: pd.DataFrame) -> dict[str, float | None]:
    """Value columns: time with communication, the part of it that is exposed, and the share that is not.

    The tail is the time from the end of backward to that of communication: what DDP adds to a step. Exposed
    are also the moments between two kernels of backward, in which nobody could have computed. The tail is
    None where nothing is communicated, or the step has no backward.
    """
    sent = lanes[lanes.lane == "communication"]
    backward = lanes[(lanes.lane == "compute") & (lanes.range == "backward")]
    total, alone = (
        float((spans.end_ms - spans.start_ms).sum()) for spans in (covered(sent), exposed(lanes))
    )
    tail = (
        float(max(0, sent.end_ms.max() - backward.end_ms.max()))
        if len(sent) and len(backward)
        else None
    )
    times = {
        "profiled_communication_ms": total,
        "profiled_exposed_ms": alone,
        "profiled_tail_ms": tail,
    }
    return times | {"overlap_share": 1 - alone / total if total else None}


def lane_rows(
    lanes: pd.DataFrame, key: Mapping[str, Any], gap_ms: float = 0.1
) -> list[dict[str, Any]]:
    """Lanes as rows, few enough to keep: gaps under `gap_ms` in a lane and stage closed; microseconds."""
    rows = []
    for lane in LANES:
        spans, found = lanes[lanes.lane == lane].sort_values("start_ms"), []
        for _, turn in spans.groupby((spans.range != spans.range.shift()).cumsum().to_numpy()):
            found += (
                covered(turn, gap_ms).round(3).assign(range=turn.range.iloc[0]).to_dict("records")
            )
        rows += [{**key, "lane": lane, "span": span, **row} for span, row in enumerate(found)]
    return rows


def told_apart(lanes: pd.DataFrame, by: str) -> pd.DataFrame:
    """Lanes of several steps for `plots.spans`: `doing` is a stage, or "communication, hidden" or "exposed".

    by: column that tells the steps apart. Copies to and from one long tensor are launched by the stage that
    communicates.
    """
    computing = lanes[lanes.lane == "compute"]
    parts = [computing.assign(doing=computing.range.replace({"communication": "copies"}))]
    for step, of_step in lanes.groupby(by, sort=False):
        sent = covered(of_step[of_step.lane == "communication"]).assign(
            doing="communication, hidden"
        )
        both = [sent, exposed(of_step).assign(doing="communication, exposed")]
        parts += [spans.assign(**{by: step}, lane="communication") for spans in both]
    return pd.concat(parts, ignore_index=True)
