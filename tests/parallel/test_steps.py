"""What steps over ranks tell: whether replicas follow one process, when messages leave, what they hide."""

from functools import partial

import pandas as pd
import pytest
import torch
from torch import nn

from cs336_systems.configs import model_size
from cs336_systems.nvtx import annotate, recording
from cs336_systems.parallel import FSDP, BucketedDDP, NaiveDDP, OverlappedDDP, launch, steps, stream
from labbook import grid, save_rows
from labbook.profiles import overlap_values, record_steps, step_lanes


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu(2))])
def test_every_wrapper_follows_one_process(backend):
    names = ["naive", "flat", "overlapped", "bucketed", "torch"]
    fixed = {"attention": "plain", **model_size("tiny").columns(), "batch_size": 4, "context_length": 16}
    fixed |= {"dtype": "float32", "world_size": 2, "backend": backend, "optimizer": list(steps.OPTIMIZERS)}
    cases = grid(implementation=names, **fixed)
    for case in cases:
        case["bucket_size_mb"] = 25.0 if case.implementation in ("bucketed", "torch") else None
    batches = list(stream(steps.training_drift, 2, cases, 2, backend=backend))
    rows = pd.DataFrame([row for rows in batches for row in rows])
    save_rows(rows, "naive_ddp", "training_drift", machine="somewhere")
    assert len(rows) == 2 * len(batches) == 4 * len(cases)
    assert (rows.query("compared == 'replicas'")["max_difference"] == 0).all()
    furthest = rows.query("compared == 'weights'").groupby("optimizer")["max_difference"].max()
    # AdamW turns the rounding of a gradient near zero into a difference of up to its rate.
    assert furthest["SGD"] < (1e-6 if backend == "gloo" else 1e-5)
    assert furthest["AdamW"] < 3e-3


def test_from_the_second_step_on_messages_leave_at_once():
    """Single gradients as they become ready, buckets with their last gradient."""
    wrappers = {"single": OverlappedDDP, "buckets": partial(BucketedDDP, bucket_size_mb=0.25)}
    log = pd.DataFrame(launch(steps.log_messages, 2, wrappers, backend="gloo")[0])
    log["sent"] = log.groupby(["wrapper", "step_index"])["gradients"].cumsum()
    log["sent_mib"] = log.groupby(["wrapper", "step_index"])["mib"].cumsum()
    first, second = (log[log["step_index"] == step] for step in (1, 2))
    assert (second["ready"] == second["sent"]).all()
    assert (second["ready_mib"] - second["sent_mib"]).abs().max() < 1e-9
    assert (first["ready"] > first["sent"]).any()
    single, buckets = (second[second["wrapper"] == name] for name in wrappers)
    assert len(single) == single["sent"].max() == buckets["sent"].max() == 21
    assert len(buckets) < 21
    assert buckets["mib"].max() <= 0.25
    assert (buckets["buffers"] == 1).all()


def lanes_of(context, name, layers=4, width=64, batch=8):
    """The lanes of this rank's third step of a few matmuls under a wrapper."""
    torch.manual_seed(0)
    modules = [nn.Linear(width, width, bias=False, device=context.device) for _ in range(layers)]
    model = {"naive": NaiveDDP, "overlapped": OverlappedDDP, "fsdp": FSDP}[name](nn.Sequential(*modules))
    inputs = torch.randn(batch, width, device=context.device)

    def step():
        model.zero_grad()
        with annotate("forward"):
            loss = model(inputs).square().mean()
        with annotate("backward"):
            loss.backward()
        with annotate("communication"):
            model.finish_gradient_synchronization()

    for _ in range(3):
        step()
    with recording():
        return step_lanes(record_steps(step, context))


def test_the_lanes_of_naive_communication_lie_behind_backward():
    for lanes in launch(lanes_of, 2, "naive", backend="gloo"):
        messages = lanes.query("lane == 'communication'")
        computed = lanes.query("lane == 'compute' and range == 'backward'")
        assert set(messages["range"]) == {"communication"}
        assert messages["start_ms"].min() >= computed["start_ms"].max()


@pytest.mark.gpu(2)
def test_on_gpus_naive_exposes_what_others_hide():
    shape = {"layers": 24, "width": 4096, "batch": 8192}  # 64 MiB each: computed in 10 ms, sent in under 1 ms
    found = {
        name: overlap_values(launch(lanes_of, 2, name, backend="nccl", **shape)[0])
        for name in ("naive", "overlapped", "fsdp")
    }
    assert found["naive"]["overlap_share"] < 0.1
    assert found["overlapped"]["overlap_share"] > 0.8
    assert found["fsdp"]["overlap_share"] > 0.6
    assert found["overlapped"]["profiled_exposed_ms"] < 0.3 * found["naive"]["profiled_exposed_ms"]
