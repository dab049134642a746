"""Workers for test_lanes.py."""

import torch
from torch import nn

from cs336_systems.bench.overlap_bench import profile_lanes, profiled
from cs336_systems.nvtx import annotate
from cs336_systems.parallel import NaiveDDP, OverlappedDDP

WRAPPERS = {"naive": NaiveDDP, "overlapped": OverlappedDDP}


def make_step(context, name, layers=4, width=64, batch=8):
    torch.manual_seed(0)
    modules = [nn.Linear(width, width, bias=False, device=context.device) for _ in range(layers)]
    model = WRAPPERS[name](nn.Sequential(*modules))
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
    return step


def save(context, machine):
    return profiled(
        make_step(context, "overlapped"),
        context,
        {"implementation": "overlapped"},
        machine,
        keep_timeline=True,
    )


def lanes(context, name, **shape):
    return profile_lanes(make_step(context, name, **shape), context)
