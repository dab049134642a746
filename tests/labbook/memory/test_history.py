"""Memory histories: synthetic snapshots of the CUDA allocator, a real step on this CPU, and damaged files."""

import inspect
from functools import partial

import pandas as pd
import pytest
import torch

from cs336_systems import accounting
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.training.steps import ModelSteps
from labbook.memory.history import (
    CATEGORIES,
    MIB,
    largest_allocations,
    read_snapshot,
    record_memory,
    stage_peaks,
    timeline,
    timeline_of_rows,
    timeline_rows,
)
from labbook.memory.operations import own_line

PARAMETER = 0x1000
STATE = 0x2000
INPUT = 0x3000
SAVED = 0x4000
SCRATCH = 0x5000
GRADIENT = 0x6000
LINE = {"filename": "/home/me/cs336/lib/cs336_systems/model.py", "line": 90, "name": "forward"}
TORCH = LINE | {"filename": "/usr/lib/python3/site-packages/torch/nn/modules/module.py"}


def change(action: str, address: int, mib: int, time_us: int, *frames: dict) -> dict:
    change = {"action": action, "addr": address, "size": mib * MIB, "time_us": time_us}
    return change | {"frames": list(frames)}


# Address, MiB, time of its life (us), and the frames that made it, the innermost first.
LIVES = [
    (SAVED, 4, 1010, 1060, TORCH, LINE, LINE | {"line": 200}),
    (SCRATCH, 2, 1020, 1025),
    (GRADIENT, 8, 1050, None, TORCH),
    (SCRATCH, 3, 1055, 1058),
    (SCRATCH, 8, 1080, 1085),
]
RANGES = [
    ("forward", 1005, 1035),
    ("layers.0", 1008, 1030),
    ("backward", 1040, 1070),
    ("optimizer", 1075, 1090),
    ("Optimizer.step#AdamW.step", 1076, 1089),
]


def a_snapshot() -> dict:
    """A step of 100 us: 8 MiB of parameters, 16 of optimizer state, 1 of input, 4 saved for backward."""
    blocks = [
        {"address": address, "requested_size": mib * MIB, "state": "active_allocated"}
        for address, mib in {PARAMETER: 8, STATE: 16, INPUT: 1, GRADIENT: 8}.items()
    ]
    blocks.append({"address": SAVED, "requested_size": 0, "state": "inactive"})
    events = [change("segment_alloc", SAVED, 20, 1009)]
    for address, mib, born, died, *frames in LIVES:
        events.append(change("alloc", address, mib, born, *frames))
        if died:
            events.append(change("free_requested", address, mib, died))
    annotations = []
    for name, start, end in RANGES:
        annotations.append({"stage": "START", "name": name, "time_us": start})
        annotations.append({"stage": "END", "name": name, "time_us": end})
    return {
        "segments": [{"blocks": blocks}],
        "device_traces": [sorted(events, key=lambda event: event["time_us"])],
        "external_annotations": annotations,
    }


BEFORE = {PARAMETER: ("parameters", 8 * MIB), STATE: ("optimizer state", 16 * MIB)}
AFTER = BEFORE | {GRADIENT: ("gradients", 8 * MIB)}


@pytest.fixture
def history():
    return read_snapshot(a_snapshot(), BEFORE, AFTER)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny model after one step, and the memory history of its second."""
    steps = ModelSteps(build_model(model_size("tiny"), 32), 2, 32)
    steps.train_step()
    stem = tmp_path_factory.mktemp("memory") / "step"
    return steps, record_memory(steps, "train_step", stem), stem


def test_every_allocation_has_a_category_a_range_and_a_line(history):
    found = history.allocations.sort_values(["size_bytes", "category"])
    assert found.category[found.size_bytes <= 4 * MIB].tolist() == [
        "other",
        "temporary",
        "temporary",
        "activations",
    ]
    assert set(found.category[found.size_bytes == 8 * MIB]) == {
        "gradients",
        "parameters",
        "temporary",
    }
    saved = found[found.category == "activations"].iloc[0]
    assert saved["range"] == "forward/layers.0"
    assert saved.code == "model.py:90 forward", "the innermost of ours"
    assert set(found[found.category == "gradients"]["range"]) == {"backward"}
    assert history.stages.name.tolist() == ["forward", "backward", "optimizer"]


def test_timeline_adds_up(history):
    held = timeline(history).set_index("at_ms")
    assert held.pop("stage").tolist() == ["forward"] * 4 + ["backward"] * 4 + ["optimizer"] * 2
    assert held.sum(axis=1).tolist() == [25, 29, 31, 29, 37, 40, 37, 33, 41, 33]
    assert held.index[-1] == pytest.approx(0.080)
    few = timeline(history, points=3)
    assert len(few) <= 3
    assert few[list(CATEGORIES)].sum(axis=1).max() == 41, "no peak is lost"


def test_a_timeline_is_rows_and_back(history):
    rows = pd.DataFrame(timeline_rows(timeline(history)))
    # The beginning and the end: nothing changes between.
    assert (rows.category == "parameters").sum() == 2
    equal = partial(pd.testing.assert_frame_equal, check_dtype=False, check_names=False)
    equal(timeline_of_rows(rows.sample(frac=1, random_state=0)), timeline(history))


def test_peak_of_each_stage_and_largest_allocations(history):
    peaks = stage_peaks(history).set_index("stage")
    assert peaks.total.to_dict() == {"forward": 31, "backward": 40, "optimizer": 41}
    assert peaks.activations.to_dict() == {"forward": 4, "backward": 4, "optimizer": 0}
    top = largest_allocations(history).head(3)
    assert top.size_mib.tolist() == [8, 8, 4]
    assert top["range"].tolist()[-1] == "forward/layers.*"


def test_memory_freed_in_the_step_but_older_than_it():
    snapshot = a_snapshot()
    snapshot["device_traces"][0].insert(0, change("free_requested", 0x9000, 5, 1006))
    assert timeline(read_snapshot(snapshot, BEFORE, AFTER)).iloc[0].other == 6
    named = read_snapshot(snapshot, BEFORE | {0x9000: ("gradients", 5 * MIB)}, AFTER)
    assert timeline(named).iloc[0].gradients == 5


def test_the_line_is_the_innermost_of_ours():
    assert own_line([("/usr/torch/nn/module.py", 90, "forward")]) == own_line([]) == ("", "")
    path, first = inspect.getsourcefile(ModelSteps), inspect.getsourcelines(ModelSteps)[1]
    recorder = (inspect.getsourcefile(own_line), 1, "labbook's")
    outer = ("/elsewhere/cs336_systems/gone.py", 90, "forward")
    text = f"training/steps.py:{first} m: class ModelSteps:"
    assert own_line([recorder, (path, first, "m"), outer]) == ("m", text), "with its text"
    assert own_line([outer]) == ("forward", "gone.py:90 forward")


def test_a_real_step_keeps_what_accounting_says(trained):
    """Parameters, gradients and state exactly; activations to the few hundred bytes of scalars."""
    steps, history, stem = trained
    held = history.allocations.groupby("category").size_bytes.sum()
    parameters = sum(parameter.nbytes for parameter in steps.model.parameters())
    assert held["parameters"] == parameters + sum(each.nbytes for each in steps.model.buffers())
    assert held["optimizer state"] == 2 * parameters
    # A gradient may be a view of a larger buffer.
    assert held["gradients"] == pytest.approx(parameters, rel=0.06)
    kept = accounting.activation_bytes(model_size("tiny"), 2, 32)
    assert held["activations"] == pytest.approx(kept, abs=512)
    assert history.stages.name.tolist() == ["forward", "backward", "optimizer"]
    assert stage_peaks(history).set_index("stage").total.idxmax() == "backward"
    assert "forward/layers.*/ffn/w1" in set(largest_allocations(history)["range"])
    inference = record_memory(steps, "forward", stem.with_name("forward"))
    assert "activations" not in set(inference.allocations.category)


@pytest.mark.gpu
def test_the_history_agrees_with_the_allocator(tmp_path):
    """The peak of our timeline is what was asked of the allocator; in its blocks it is a little more."""
    steps = ModelSteps(build_model(model_size("small"), 256, device="cuda"), 4, 256)
    steps.train_step()
    torch.cuda.reset_peak_memory_stats()
    history = record_memory(steps, "train_step", tmp_path / "step")
    peaks = stage_peaks(history).set_index("stage")
    requested = torch.cuda.memory_stats()["requested_bytes.all.peak"] / MIB
    assert peaks.total.max() == pytest.approx(requested, rel=1e-4)
    assert requested <= torch.cuda.max_memory_allocated() / MIB <= 1.05 * requested
    assert peaks.index.tolist() == ["forward", "backward", "optimizer"]
    activations = history.allocations.query("category == 'activations'").size_bytes.sum()
    assert activations == pytest.approx(
        accounting.activation_bytes(model_size("small"), 4, 256), rel=0.02
    )
    assert largest_allocations(history).code.str.contains(r"\.py:\d+ ").any()
