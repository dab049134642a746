"""Lanes of a step: what is exposed, against counting on a grid."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labbook.profiles import activity_spans, exposed, lane_rows, overlap_values, step_lanes

GEMM = "ampere_sgemm_128x64_tn"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
spans = st.lists(
    st.tuples(st.sampled_from(["compute", "communication"]), st.integers(0, 30), st.integers(0, 8)),
    max_size=12,
)


def frame(rows, range_="backward") -> pd.DataFrame:
    """Rows of (lane, start, length)."""
    rows = [(lane, range_, float(start), float(start + length)) for lane, start, length in rows]
    return pd.DataFrame(rows, columns=["lane", "range", "start_ms", "end_ms"])


def cells(rows, lane) -> set[int]:
    spans = [range(start, start + length) for name, start, length in rows if name == lane]
    return {cell for span in spans for cell in span}


@given(spans)
def test_overlap_counts_what_a_grid_counts(rows):
    communication = cells(rows, "communication")
    compute = cells(rows, "compute")
    values = overlap_values(frame(rows))
    assert values["profiled_communication_ms"] == len(communication)
    assert values["profiled_exposed_ms"] == len(communication - compute)
    share = len(communication & compute) / len(communication) if communication else None
    assert values["overlap_share"] == pytest.approx(share)
    stretches = exposed(frame(rows)).astype(int).to_numpy().tolist()
    on_grid = {cell for start, end in stretches for cell in range(start, end)}
    assert on_grid == communication - compute
    # Kept as rows without a gap, they say the same.
    kept = pd.DataFrame(lane_rows(frame(rows), {}, gap_ms=0), columns=frame([]).columns)
    assert len(kept) <= len(rows)
    assert overlap_values(kept) == values


def test_the_tail_begins_where_backward_ends():
    forward = frame([("compute", 0, 4)], "forward")
    backward = frame(
        [
            ("compute", 4, 2),
            ("compute", 7, 2),
            ("communication", 5, 1),
            ("communication", 6, 7),
        ]
    )
    assert overlap_values(pd.concat([forward, backward]))["profiled_tail_ms"] == 13 - 9
    assert overlap_values(backward)["profiled_exposed_ms"] == 1 + 4
    assert overlap_values(forward)["profiled_tail_ms"] is None


def test_rows_bridge_small_gaps_and_keep_stages_apart():
    forward = frame([("compute", 0, 2), ("compute", 3, 2), ("compute", 9, 1)], "forward")
    backward = frame([("compute", 10, 5), ("communication", 10, 2), ("communication", 12, 3)])
    lanes = pd.concat([forward, backward])
    lanes[["start_ms", "end_ms"]] /= 20  # of the first gaps one is below 0.1 ms
    fewer = pd.DataFrame(lane_rows(lanes, {"rank": 0}))
    assert set(fewer["rank"]) == {0}
    found = fewer[["lane", "span", "range", "start_ms", "end_ms"]].to_numpy().tolist()
    assert found == [
        ["compute", 0, "forward", 0, 0.25],
        ["compute", 1, "forward", 0.45, 0.5],
        ["compute", 2, "backward", 0.5, 0.75],
        ["communication", 0, "backward", 0.5, 0.75],
    ]


def test_communication_is_exposed_where_nothing_is_computed():
    """Two steps: in one 2 ms follow backward, in the other 1 ms runs in it and 1 ms follows."""
    backward = [("compute", 4, 6)]
    naive = frame(backward + [("communication", 10, 2)])
    overlapped = frame(backward + [("communication", 9, 2)])
    steps = pd.concat([naive.assign(step="naive"), overlapped.assign(step="overlapped")])
    spans = activity_spans(steps, "step").set_index("lane")
    spans = spans[["step", "doing", "start_ms", "end_ms"]]
    assert spans.loc["compute"].to_numpy().tolist() == [
        ["naive", "backward", 4, 10],
        ["overlapped", "backward", 4, 10],
    ]
    assert spans.loc["communication"].to_numpy().tolist() == [
        ["naive", "communication, hidden", 10, 12],
        ["naive", "communication, exposed", 10, 12],
        ["overlapped", "communication, hidden", 9, 11],
        ["overlapped", "communication, exposed", 10, 11],
    ]


def test_of_two_ranks_in_one_report_one_is_shown(a_profile):
    ranges = [("measure", 0, 1000)]
    computes = ranges, [(GEMM, 10, 100, 300), (NCCL, 20, 300, 310)]
    profile = a_profile(ranges, [(GEMM, 10, 20, 100), (NCCL, 20, 100, 300)], other=computes)
    values = overlap_values(step_lanes(profile))
    assert values["profiled_exposed_ms"] == values["profiled_communication_ms"]


def test_lanes_of_a_profile(a_profile):
    """NCCL on its own stream, launched in backward, running on while nothing is computed."""
    ranges = [
        ("measure", 0, 1000),
        ("forward", 0, 100),
        ("backward", 100, 300),
        ("communication", 300, 400),
    ]
    kernels = [
        (GEMM, 50, 60, 200),
        (GEMM, 150, 200, 400),
        (NCCL, 210, 300, 500, 21),
        (NCCL, 310, 500, 550, 21),
    ]
    lanes = step_lanes(a_profile(ranges, kernels))
    assert lanes[["lane", "range"]].to_numpy().tolist() == [
        ["compute", "forward"],
        ["compute", "backward"],
        ["communication", "backward"],
        ["communication", "communication"],
    ]
    values = [250e-6, 150e-6, 150e-6, 0.4]
    assert list(overlap_values(lanes).values()) == pytest.approx(values)
