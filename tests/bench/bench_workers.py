"""Workers for the tests of distributed benches."""

import torch
from torch import nn

from cs336_systems.bench.overlap_bench import profile_lanes, profile_overlap
from cs336_systems.nvtx import annotate
from cs336_systems.parallel import NaiveDDP, OverlappedDDP


def _make_step(context, wrapper, layers=4, width=64, batch=8):
    torch.manual_seed(0)
    modules = [nn.Linear(width, width, bias=False, device=context.device) for _ in range(layers)]
    model = wrapper(nn.Sequential(*modules))
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


def overlap_of_overlapped(context, key):
    return profile_overlap(_make_step(context, OverlappedDDP), context, key, with_timeline=True)


def lanes(context, name, **shape):
    wrapper = {"naive": NaiveDDP, "overlapped": OverlappedDDP}[name]
    return profile_lanes(_make_step(context, wrapper, **shape), context)
