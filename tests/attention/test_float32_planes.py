"""float32 by planes of bfloat16: its numbers, through the interpreter, and where it runs.

tests/attention/test_flash_gpu.py has the shipped tiles at work.
"""

import dataclasses

import pytest
import torch

from cs336_systems.attention.config import PLANES_KERNELS, Tile, select_config
from cs336_systems.checks import AttentionCase, check_attention

pytest.importorskip("triton")
from cs336_systems.attention import FlashAttentionTriton, flash_triton, launcher
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.launcher import (
    Backward,
    HopperBackward,
    HopperForward,
    Planes,
    PlanesBackward,
    PlanesForward,
    backward_launcher,
    config_for,
    forward_launcher,
    layout,
)
from cs336_systems.kernels.runtime import INTERPRETED

HOPPER, AMPERE = (9, 0), (8, 0)
TILES = dict(zip(PLANES_KERNELS, (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)), strict=True))


@pytest.fixture
def planes(monkeypatch):
    """config_for as for long sequences on Hopper."""
    if not INTERPRETED:
        pytest.skip("a GPU decides by itself whether it has these kernels")

    def with_planes(*arguments):
        return dataclasses.replace(config_for(*arguments).with_tiles(**TILES), sm_count=0)

    monkeypatch.setattr(flash_triton, "config_for", with_planes)
    monkeypatch.setattr(launcher, "PLANES_LENGTH", dict.fromkeys((16, 32, 64, 128), 1))
    monkeypatch.setattr(flash_triton, "_forwards", {})
    monkeypatch.setattr(flash_triton, "_backwards", {})
    yield
    prepared = *flash_triton._forwards.values(), *flash_triton._backwards.values()
    used = [launch for launch, *_ in prepared]
    assert {type(launch) for launch in used} == {PlanesForward, PlanesBackward}


@pytest.mark.usefixtures("planes")
def test_error_at_most_twice_pytorchs():
    cases = [
        AttentionCase("odd lengths, causal", (2,), 77, 131, 33, is_causal=True),
        AttentionCase("more queries than keys", (2, 2), 70, 30, 20),
        AttentionCase("large scores", (2,), 64, 64, 64, is_causal=True, logit_scale=30.0),
        AttentionCase("a large head", (), 40, 50, 128, is_causal=True),
    ]
    check_attention(FlashAttentionTriton.apply, cases=cases)


def both_passes(q, k, v, do):
    o, logsumexp, rest = flash_forward(q, k, v, True)
    return o, logsumexp, rest, *flash_backward(do, q, k, v, o, logsumexp, True, rest)


@pytest.mark.usefixtures("planes")
def test_the_same_bits_in_any_layout_and_every_time():
    layouts = [
        lambda x: x.clone(),
        lambda x: x.transpose(0, 2).mT.contiguous().mT.transpose(0, 2),
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ]
    tensors = torch.randn(4, 1, 2, 40, 20).unbind()
    wanted = both_passes(*tensors)
    for change in layouts:
        assert all(map(torch.equal, both_passes(*map(change, tensors)), wanted))


@pytest.mark.usefixtures("planes")
def test_expanded_inputs_and_gradient():
    q, k, v = torch.randn(3, 2, 20, 24).unbind()
    expanded = q, k[:1].expand_as(k), v[:, :1].expand_as(v), torch.ones(()).expand_as(q)
    results, wanted = both_passes(*expanded), both_passes(*(x.contiguous() for x in expanded))
    assert all(map(torch.equal, results, wanted))


@pytest.mark.usefixtures("planes", "nan_memory")
@pytest.mark.parametrize(("n", "d"), [(1, 1), (37, 33)])
def test_every_element_is_written(n, d):
    q, do = torch.randn(2, 2, n, d).unbind()
    k, v = torch.randn(2, 2, 90, d).unbind()
    assert all(x.isfinite().all() for x in both_passes(q, k, v, do))


@pytest.mark.skipif(not INTERPRETED, reason="planes are float32 in the interpreter alone")
def test_three_planes_hold_all_bits():
    x = torch.randn(2, 3, 50, 20) * 2.0 ** torch.randint(-90, 90, (2, 3, 50, 20))
    config = select_config(torch.float32, 20, HOPPER, 1).with_tiles(**TILES)
    planes, *_ = Planes([layout(x)] * 3, config, False).planes(x, x, x)
    planes = planes.view(2, 3, 3, 50, 20)
    assert torch.equal(planes, planes.bfloat16().float())
    assert torch.equal(planes[:, :, 2] + planes[:, :, 1] + planes[:, :, 0], x)


def launchers(
    n_queries, n_keys, d, heads=16, dtype=torch.float32, capability=HOPPER, sm_count=132, tf32=False
):
    """What runs forward, backward, and backward where the same bits are asked for."""
    queries, keys = (((heads, n, d), (n * d, d, 1)) for n in (n_queries, n_keys))
    config = select_config(dtype, d, capability, sm_count, tf32)
    forward = forward_launcher((queries, keys, keys, queries), config, True)
    inputs = queries, keys, keys, queries, queries, queries, keys, keys
    return [type(forward), *(type(backward_launcher(inputs, config, True, same)) for same in (False, True))]


@pytest.mark.parametrize(
    "problem",
    [
        {"n_queries": 1024, "n_keys": 1024, "d": 64, "heads": 1, "sm_count": 142},  # 64 parts of programs
        {"n_queries": 2048, "n_keys": 1024, "d": 33},
        {"n_queries": 512, "n_keys": 512, "d": 128},
        {"n_queries": 2048, "n_keys": 2048, "d": 32},
    ],
)
def test_long_sequences_run_it(problem):
    assert launchers(**problem) == [PlanesForward, PlanesBackward, PlanesBackward]


@pytest.mark.parametrize(
    "problem",
    [
        {"n_queries": 1024, "n_keys": 1024, "d": 64, "heads": 16, "sm_count": 2300},
        {"n_queries": 511, "n_keys": 4096, "d": 64, "heads": 200},  # too short
        {"n_queries": 4096, "n_keys": 511, "d": 64, "heads": 200},
        {"n_queries": 2047, "n_keys": 4096, "d": 32},
        {"n_queries": 4096, "n_keys": 4096, "d": 16},
        {"n_queries": 4096, "n_keys": 4096, "d": 256},
        {"n_queries": 4096, "n_keys": 4096, "d": 64, "tf32": True},
        {"n_queries": 4096, "n_keys": 4096, "d": 64, "capability": AMPERE},
    ],
)
def test_what_stays_with_the_kernels_for_all_gpus(problem):
    assert not any(issubclass(chosen, Planes) for chosen in launchers(**problem))


def test_16_bits_have_hoppers_other_kernels():
    assert launchers(4096, 4096, 64, dtype=torch.bfloat16) == [HopperForward, HopperBackward, Backward]
