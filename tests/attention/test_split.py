"""Walks over keys and queries that several programs share, and both backward kernels in one launch.

As on a GPU with more SMs than there are programs; through the interpreter.
"""

import dataclasses

import pytest
import torch

from cs336_systems.attention.config import KERNELS, PLANES_KERNELS, SplitLimits, Tile, select_config
from cs336_systems.checks import AttentionCase, check_attention

pytest.importorskip("triton")
import large_scores

from cs336_systems.attention import FlashAttentionTriton, flash_triton, launcher
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.launcher import (
    NOT_SPLIT,
    Backward,
    Forward,
    HopperForward,
    OneLaunchBackward,
    PlanesBackward,
    PlanesForward,
    Problem,
    backward_launcher,
    config_for,
    forward_launcher,
)
from cs336_systems.kernels.runtime import INTERPRETED

HOPPER, AMPERE = (9, 0), (8, 0)
INTO_MANY = SplitLimits(shortest=16, long=1, many=100, most=100)
TILES = dict.fromkeys(KERNELS, Tile(32, 16, 4, 1)) | dict.fromkeys(PLANES_KERNELS, Tile(16, 32, 4, 1))
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a GPU decides by itself how walks are split")


@pytest.fixture(params=["portable", "planes"])
def split(request, monkeypatch):
    """config_for as where all walks are split, into parts of 32 rows; afterwards that they were."""

    def with_splits(*arguments):
        names = KERNELS if request.param == "portable" else KERNELS + PLANES_KERNELS
        config = config_for(*arguments).with_tiles(**{name: TILES[name] for name in names})
        return dataclasses.replace(config, splits=dict.fromkeys(names, INTO_MANY), sm_count=100)

    monkeypatch.setattr(launcher, "PLANES_LENGTH", dict.fromkeys((16, 32, 64), 1))
    monkeypatch.setattr(launcher, "PROGRAMS_PER_SM", dict.fromkeys(PLANES_KERNELS, 0))
    monkeypatch.setattr(flash_triton, "config_for", with_splits)
    monkeypatch.setattr(flash_triton, "_forwards", {})
    monkeypatch.setattr(flash_triton, "_backwards", {})
    yield
    prepared = *flash_triton._forwards.values(), *flash_triton._backwards.values()
    used = [launch for launch, *_ in prepared]
    both = {Forward, OneLaunchBackward} if request.param == "portable" else {PlanesForward, PlanesBackward}
    assert {type(launch) for launch in used} == both
    assert all(launch.parts > 1 for launch in used)


@interpreted
@pytest.mark.usefixtures("split")
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("more keys, causal", (2,), 77, 131, 33, is_causal=True),
        AttentionCase("more queries, causal", (1, 2), 131, 77, 20, is_causal=True),
        AttentionCase("keys that no query sees", (), 70, 200, 16, is_causal=True),
        AttentionCase("full", (2,), 70, 90, 20),
        AttentionCase("large scores", (2,), 96, 96, 64, is_causal=True, logit_scale=30.0),
    ],
    ids=lambda case: case.name,
)
def test_error_at_most_twice_pytorchs(case):
    check_attention(FlashAttentionTriton.apply, cases=[case])


@interpreted
@pytest.mark.usefixtures("split")
def test_large_scores_keep_their_bits():
    large_scores.check_l_and_rest("cpu")
    large_scores.check_that_backward_reads_rest("cpu")


def both_passes(q, k, v, do, is_causal=True):
    o, logsumexp, rest = flash_forward(q, k, v, is_causal)
    return o, logsumexp, rest, *flash_backward(do, q, k, v, o, logsumexp, is_causal, rest)


@interpreted
@pytest.mark.usefixtures("split")
def test_the_same_bits_in_any_layout():
    tensors = torch.randn(4, 1, 2, 80, 20).unbind()
    wanted = both_passes(*tensors)
    for layout in (torch.clone, lambda x: x.mT.contiguous().mT, lambda x: torch.stack([x, x], -1)[..., 0]):
        assert all(map(torch.equal, both_passes(*map(layout, tensors)), wanted))


@interpreted
@pytest.mark.usefixtures("split", "nan_memory")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(70, 200), (200, 70)])
def test_nothing_is_read_that_was_not_written(n_queries, n_keys, is_causal):
    q, do = torch.randn(2, 2, n_queries, 24).unbind()
    k, v = torch.randn(2, 2, n_keys, 24).unbind()
    assert all(x.isfinite().all() for x in both_passes(q, k, v, do, is_causal))


def problem(n, d=64, heads=1, dtype=torch.bfloat16, capability=HOPPER, sm_count=132):
    layouts = ((heads, n, d), (n * d, d, 1))
    return [layouts] * 3, select_config(dtype, d, capability, sm_count)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"n": 512}, 1),  # there are not four parts of 256
        ({"n": 1024}, 4),
        ({"n": 8192}, 4),  # 128 programs of unequal length
        ({"n": 16_384}, 2),  # 256 programs
        ({"n": 32_768}, 1),  # Hopper's own
        ({"n": 1024, "heads": 2}, 2),
        ({"n": 1024, "heads": 4}, 1),  # what is written would take longer
        ({"n": 2048, "heads": 16}, 1),
        ({"n": 1024, "sm_count": 66}, 2),
        ({"n": 1024, "dtype": torch.float32, "capability": AMPERE}, 8),
        ({"n": 1024, "capability": AMPERE}, 4),
        ({"n": 1024, "d": 256}, 4),
    ],
)
def test_walks_are_split_while_sms_have_no_programs(sizes, parts):
    inputs, config = problem(**sizes)
    launch = forward_launcher((*inputs, inputs[0]), config, True)
    hoppers = "hopper_forward" in config.tiles and parts == 1
    assert type(launch) is (HopperForward if hoppers else Forward)
    assert hoppers or launch.parts == parts
    split = launch.split("forward")
    assert (split is NOT_SPLIT) == (parts == 1)
    assert split.parts * split.span >= sizes["n"] or parts == 1


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ({"n": 512}, OneLaunchBackward),
        ({"n": 512, "heads": 16}, OneLaunchBackward),  # 256 programs: two for every SM
        ({"n": 1024, "heads": 16}, Backward),
        ({"n": 16_384}, OneLaunchBackward),  # 512, split
        ({"n": 256, "heads": 16, "dtype": torch.float32}, Backward),
        ({"n": 256, "dtype": torch.float32}, OneLaunchBackward),  # split
        ({"n": 96, "dtype": torch.float32}, Backward),  # scores in chunks
        ({"n": 128, "d": 16, "dtype": torch.float32}, OneLaunchBackward),
        ({"n": 512, "d": 256}, Backward),
        ({"n": 512, "capability": AMPERE, "heads": 64}, Backward),
    ],
)
def test_few_programs_go_into_one_launch(sizes, chosen):
    inputs, config = problem(**sizes)
    assert type(backward_launcher((*inputs, *[inputs[0]] * 5), config, True, False)) is chosen


@pytest.mark.parametrize(
    ("n", "d", "planes"), [(1024, 64, True), (1024, 32, False), (2048, 32, True), (512, 128, False)]
)
def test_both_passes_choose_planes_or_both_do_not(n, d, planes):
    inputs, config = problem(n, d, dtype=torch.float32)
    forward = forward_launcher((*inputs, inputs[0]), config, True)
    backward = backward_launcher((*inputs, *[inputs[0]] * 5), config, True, False)
    assert isinstance(forward, PlanesForward) == isinstance(backward, PlanesBackward) == planes


@pytest.mark.parametrize("kernel", ["forward", "backward", "planes_forward", "planes_dkdv"])
@pytest.mark.parametrize("n", [512, 1000, 1100, 5000])
def test_parts_are_whole_tiles_and_cover_the_walk(kernel, n):
    inputs, config = problem(n, dtype=torch.float32)
    one = Problem(inputs, config, True)
    split, tile = one.split(kernel), one.tile(kernel)
    assert split.span % tile.block_m == split.span % tile.block_n == 0
    assert split is NOT_SPLIT or (split.parts - 1) * split.span < n <= split.parts * split.span
