"""AdamW against torch's own, and what it promises about memory."""

import copy

import pytest
import torch
from memory_probes import LiveBytes
from torch import nn
from torch.testing import assert_close

from cs336_systems.optimizer import AdamW

SHAPES = ((5, 7), (3,), (), (2, 3, 4), (11, 1))


def parameters(dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Complex ones with a conjugation that is lazy."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        gradient = scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = (gradient * (1 + 2j)).conj() if gradient.is_complex() else gradient


def in_groups(params):
    return [
        {"params": params[:2], "lr": 0.05, "weight_decay": 0.0},
        {"params": params[2:3], "betas": (0.5, 0.9), "eps": 1e-3},
        {"params": params[3:]},
    ]


@pytest.mark.parametrize(
    ("dtype", "groups", "settings"),
    [
        (torch.float32, list, {}),
        (torch.float32, list, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4}),
        (torch.float32, in_groups, {"lr": 0.01}),
        (torch.complex64, list, {"lr": 0.1}),
    ],
)
def test_100_steps_are_torchs(dtype, groups, settings):
    ours = parameters(dtype)
    theirs = parameters(dtype)
    own = AdamW(groups(ours), **settings)
    other = torch.optim.AdamW(groups(theirs), **settings)
    assert own.defaults.items() <= other.defaults.items()
    for step in range(100):
        for params, optimizer in ((ours, own), (theirs, other)):
            optimizer.param_groups[-1]["lr"] *= 0.99  # as a scheduler does
            give_gradients(params, step, scale=10.0 ** (step % 5 - 3))
            params[1].grad = None  # it is left alone
        for parameter in theirs:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.resolve_conj()  # which torch's asks for
        own.step()
        other.step()
    assert all(parameter.isfinite().all() for parameter in ours)
    assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    assert ours[1] not in own.state


@pytest.mark.parametrize(("kind", "off"), [(AdamW, 0), (torch.optim.AdamW, 1e-9)])
def test_a_state_is_taken_over(kind, off):
    params = parameters(torch.float64)
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:]}]
    optimizer = kind(groups, betas=(0.9, 0.9999))
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    loaded, state = copy.deepcopy((params, optimizer.state_dict()))
    resumed = AdamW([{"params": loaded[:2]}, {"params": loaded[2:]}])
    resumed.load_state_dict(state)
    for step in range(3, 6):
        give_gradients(params, step)
        give_gradients(loaded, step)
        optimizer.step()
        resumed.step()
    assert_close(loaded, params, rtol=off, atol=off)


def test_a_step_works_in_place_with_one_buffer():
    params = [nn.Parameter(torch.randn(size)) for size in (1000, 4000, 3000)]
    give_gradients(params, seed=0)
    optimizer = AdamW(params)
    optimizer.step()
    addresses = [parameter.data_ptr() for parameter in params]
    existing = list(params)
    for parameter in params:
        state = optimizer.state[parameter]
        existing += [parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
    with LiveBytes(*existing) as memory:
        before = memory.peak
        optimizer.step()
    assert memory.peak == before + 4 * 4000
    assert addresses == [parameter.data_ptr() for parameter in params]


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"lr": -1}, "lr.*-1"),
        ({"weight_decay": float("inf")}, "weight_decay.*inf"),
        ({"betas": (0.9, 1.0)}, r"betas.*\(0.9, 1.0\)"),
    ],
)
def test_settings_outside_their_range_are_refused(bad, match):
    params = parameters()
    with pytest.raises(ValueError, match=match):
        AdamW(params, **bad)
    with pytest.raises(ValueError, match=match):
        AdamW([{"params": params[:1]}, {"params": params[1:]} | bad])
