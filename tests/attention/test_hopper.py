"""Hopper's own kernels: where they are chosen, and how they are called. What they compute, a GPU tells."""

import dataclasses

import pytest
import torch

from cs336_systems.attention.config import HOPPERS_OWN, tile_by_hand

pytest.importorskip("triton")
from cs336_systems.attention import (
    flash_triton,
)
from cs336_systems.attention import (
    hopper_launch as hopper,
)
from cs336_systems.attention import (
    launch_plans as plans,
)
from cs336_systems.attention import (
    launcher as launch,
)

LAYOUT = (2, 4, 300, 40), (48_000, 12_000, 40, 1)  # three programs of 128 keys a head
TILES = [tile_by_hand(kernel, "half", 64, (9, 0)) for kernel in HOPPERS_OWN]
DEVICE = torch.device("cpu" if flash_triton.INTERPRETED else "cuda")
PORTABLE = dataclasses.replace(
    plans.way_for(torch.float16, 40, DEVICE), forward_by_hand=None, backward_by_hand=None
)


def way(programs):
    """As on a GPU of Hopper's with so many processors."""
    forward, backward = TILES
    return dataclasses.replace(
        PORTABLE, forward_by_hand=forward, backward_by_hand=backward, processors=programs, descriptors=True
    )


def test_its_forward_runs_where_there_is_one():
    assert plans.forward_plan((LAYOUT,) * 4, way(1000), True).__module__ == hopper.__name__
    assert plans.forward_plan((LAYOUT,) * 4, PORTABLE, True).__module__ == plans.__name__


@pytest.mark.parametrize(
    ("processors", "deterministic", "chosen"),
    [(24, False, hopper), (25, False, plans), (24, True, plans)],
)
def test_its_backward_needs_a_program_for_every_processor_and_repeats_no_bits(
    processors, deterministic, chosen
):
    plan = plans.backward_plan((LAYOUT,) * 8, way(processors), True, deterministic)
    assert plan.__module__ == chosen.__name__


def test_elsewhere_there_are_none():
    assert [tile_by_hand(kernel, "half", 64, (8, 0)) for kernel in HOPPERS_OWN] == [None, None]
    assert [tile_by_hand(kernel, "exact", 64, (9, 0)) for kernel in HOPPERS_OWN] == [None, None]
    assert [tile_by_hand(kernel, "half", 32, (9, 0)) for kernel in HOPPERS_OWN] == [None, None]


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_second_launch_passes_the_constants_in_the_kernels_order(is_causal, monkeypatch):
    """The compiled kernel takes by position what the first launch passes by name."""

    class Recorder(launch.Launch):
        def __init__(self, kernel, programs, numbers, constants, tile):
            names = kernel.arg_names
            tensors = [name for name in names if name.endswith(("_src", "_ptr"))]
            assert names[-len(constants) :] == list(constants)
            assert names[: len(tensors)] == tensors
            assert len(names) == len(tensors) + len(numbers) + len(constants)
            seen.append(kernel)

    seen = []
    monkeypatch.setattr(hopper, "Launch", Recorder)
    problem = plans.Problem(LAYOUT, LAYOUT, way(1), is_causal)
    hopper.hopper_forward_plan(problem, (LAYOUT,) * 4)
    hopper.hopper_backward_plan(problem, (LAYOUT,) * 8)
    assert {hopper.hopper_forward_kernel, hopper.hopper_backward_kernel} < set(seen)
    assert len(seen) == 4
