"""What steps over ranks tell: what messages hide. Notebooks 35 and 37 ask when they leave."""

import pytest
import torch
from torch import nn

from cs336_systems.nvtx import annotate, recording
from cs336_systems.parallel import FSDP, NaiveDDP, OverlappedDDP, launch
from labbook.profiles import overlap_values, record_steps, step_lanes


def lanes_of(context, name, layers=4, width=64, batch=8):
    """The lanes of this rank's third step of a few matmuls under a wrapper."""
    torch.manual_seed(0)
    modules = [nn.Linear(width, width, bias=False, device=context.device) for _ in range(layers)]
    wrappers = {"naive": NaiveDDP, "overlapped": OverlappedDDP, "fsdp": FSDP}
    model = wrappers[name](nn.Sequential(*modules))
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
    # 64 MiB each: computed in 10 ms, sent in under 1 ms.
    shape = {"layers": 24, "width": 4096, "batch": 8192}
    naive, overlapped, fsdp = (
        overlap_values(launch(lanes_of, 2, name, backend="nccl", **shape)[0])
        for name in ("naive", "overlapped", "fsdp")
    )
    assert naive["overlap_share"] < 0.1
    assert overlapped["overlap_share"] > 0.8
    assert fsdp["overlap_share"] > 0.6
    assert overlapped["profiled_exposed_ms"] < 0.3 * naive["profiled_exposed_ms"]
