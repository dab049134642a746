"""Workers for the tests of distributed benches."""

import time
import warnings

import torch
from torch import nn

from cs336_systems.bench.collectives_bench import time_collectives
from cs336_systems.bench.overlap_bench import profile_lanes, profile_overlap
from cs336_systems.nvtx import annotate
from cs336_systems.parallel import NaiveDDP, OverlappedDDP
from labbook import time_together


def time_collectives_strictly(context, **options):
    warnings.simplefilter("error")
    time_collectives(context, **options)


def time_naps(context):
    """Rank 0 naps for 10 ms, rank 1 for 20 ms; three naps a step."""
    nap = 0.01 * (1 + context.rank)
    return time_together(lambda: time.sleep(nap), context, warmup_steps=1, steps=2, calls=3).step_ms


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
