"""The Triton kernels in every form that a GPU may choose, through the interpreter.

tests/attention/test_flash_gpu.py has the shipped tiles at work.
"""

import dataclasses
import math

import pytest
import torch

from cs336_systems.attention.plain import plain_attention
from cs336_systems.attention.tiles import KERNELS, SplitLimits, Tile
from cs336_systems.checks import AttentionCase, check_attention

pytest.importorskip("triton")
from tests.attention.races import both_passes
from tests.layouts import LAYOUTS

from cs336_systems.attention import FlashAttentionTriton, choose, flash_triton
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.launcher import Launcher, tuning_for
from cs336_systems.attention.layouts import layout
from cs336_systems.kernels.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU decides by itself which kernels run")
INTO_MANY = SplitLimits(shortest=8, long=1, many=100, most=100)
NARROW = dict.fromkeys(KERNELS, Tile(32, 16, 4, 1))
BF16X3 = {
    "bf16x3_forward": Tile(64, 32, 4, 1),
    "bf16x3_dq": Tile(32, 64, 4, 1),
    "bf16x3_dkdv": Tile(64, 32, 4, 1),
}
# What replaces parts of tuning_for's, and the kernels that run then.
FORMS = {
    "as they are": ({}, {}, {"forward", "dq", "dkdv"}),
    "one launch": (
        {},
        {"sm_count": 1000, "splits": {}},
        {"forward", "backward"},
    ),
    "by pointers": (
        {},
        {"use_tma": False},
        {"forward", "dq", "dkdv"},
    ),
    "in chunks": (
        dict.fromkeys(KERNELS, Tile(32, 64, 4, 1, chunk=16)),
        {"use_tma": False},
        {"forward", "dq", "dkdv"},
    ),
    "split": (
        NARROW,
        {"splits": dict.fromkeys(NARROW, INTO_MANY), "sm_count": 100},
        {"forward", "backward"},
    ),
    "bf16x3": (
        BF16X3,
        {"sm_count": 0},
        set(BF16X3),
    ),
    "bf16x3, split": (
        dict.fromkeys(BF16X3, Tile(16, 32, 4, 1)),
        {"splits": dict.fromkeys(BF16X3, INTO_MANY), "sm_count": 100},
        set(BF16X3),
    ),
}
# Name, leading dimensions, queries, keys, d, causal, deviation of the scores.
CASES = [
    AttentionCase("more keys, causal", (2,), 50, 97, 33, True),
    AttentionCase("more queries, causal", (1, 2), 97, 66, 20, True),
    AttentionCase("keys that no query sees", (), 40, 130, 16, True),
    AttentionCase("full", (2,), 40, 70, 20),
    AttentionCase("large scores", (2,), 64, 64, 64, True, 30.0),
]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """tuning_for as where these kernels run; afterwards that they ran."""
    tiles, changes, kernels = FORMS[request.param]

    def tuning_of_form(*arguments):
        tuning = tuning_for(*arguments).with_tiles(**tiles)
        return dataclasses.replace(tuning, **changes)

    monkeypatch.setattr(choose, "BF16X3_LENGTH", dict.fromkeys((16, 32, 64, 128), 1))
    monkeypatch.setattr(choose, "PROGRAMS_PER_SM", dict.fromkeys(BF16X3, 0))
    monkeypatch.setattr(flash_triton, "tuning_for", tuning_of_form)
    monkeypatch.setattr(flash_triton, "_forwards", {})
    monkeypatch.setattr(flash_triton, "_backwards", {})
    plans = []

    def launcher(*arguments):
        launcher = Launcher(*arguments)
        plans.append(launcher.plan)
        return launcher

    monkeypatch.setattr(flash_triton, "Launcher", launcher)
    yield request.param
    assert set().union(*(plan.tiles for plan in plans)) == kernels
    is_split = "split" in request.param
    assert {plan.splits > 1 for plan in plans} == {is_split}


@pytest.mark.usefixtures("form")
def test_error_at_most_twice_pytorchs():
    check_attention(FlashAttentionTriton.apply, cases=CASES)


@pytest.mark.usefixtures("form")
def test_l_has_the_bits_of_a_float32_and_its_residual_those_that_it_lacks():
    # Of small integers, 16 dimensions and so a scale of 1/4, scores are exact; of some hundred, float32's
    # steps are of 3e-5 and more.
    q, k, v = (torch.randint(-30, 30, (2, 90, 16)).float() for _ in range(3))
    _, logsumexp, residual = flash_forward(q, k, v, False)
    exact = (q.double() @ k.double().mT / 4).logsumexp(-1)
    assert exact.max() > 500
    assert (logsumexp - exact).abs().max() > 1e-5
    assert (logsumexp.double() + residual.squeeze(-1) - exact).abs().max() < 1e-6
    q, k, v, do = torch.randn(4, 2, 90, 16).unbind()
    o, logsumexp, residual = flash_forward(q, k, v, True)
    wanted = flash_backward(do, q, k, v, o, logsumexp, True, residual)
    moved = flash_backward(do, q, k, v, o, logsumexp - 0.5, True, residual + 0.5)
    torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("form")
def test_the_same_bits_in_any_layout():
    tensors = torch.randn(4, 1, 2, 34, 20).unbind()
    contiguous = both_passes(*tensors)
    for change in LAYOUTS.values():
        assert all(map(torch.equal, both_passes(*map(change, tensors)), contiguous))
    q, k, v, _ = tensors
    one_head = k[:, :1].expand_as(k)
    one_row = v[..., :1, :].expand_as(v)
    one_number = torch.ones(()).expand_as(q)
    expanded = both_passes(q, one_head, one_row, one_number)
    contiguous = both_passes(*(x.contiguous() for x in (q, one_head, one_row, one_number)))
    assert all(map(torch.equal, expanded, contiguous))


@pytest.mark.usefixtures("form", "nan_memory")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(40, 100), (100, 66)])
def test_nothing_is_read_that_was_not_written(n_queries, n_keys, is_causal):
    q, do = torch.randn(2, 2, n_queries, 24).unbind()
    k, v = torch.randn(2, 2, n_keys, 24).unbind()
    outputs = both_passes(q, k, v, do, is_causal)
    assert all(x.isfinite().all() for x in outputs)


# What a query's scores with the first keys are made of; all minus infinity.
HIDDEN = {
    "infinite keys": (1.0, -math.inf),
    "overflow": (1e20, -1e20),
}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("count", [64, 96])
def test_scores_of_minus_infinity_weigh_nothing(hidden, count):
    """Also of a whole tile of keys, where exp(-inf - -inf) is NaN. Where a query has no others, O is 0."""
    q, do = torch.randn(2, 2, 40, 16).unbind()
    k, v = torch.randn(2, 2, 96, 16).unbind()
    scale, key = hidden
    q = (q.abs() + 0.1) * scale
    k = k / scale
    k[:, :count] = key
    o, logsumexp, _, dq, dk, dv = both_passes(q, k, v, do, False)
    if count == 96:
        assert not o.any()
        assert logsumexp.isposinf().all()
    else:
        torch.testing.assert_close(o, plain_attention(q, k, v), rtol=1e-4, atol=1e-4)
    assert not dk[:, :count].any()
    assert not dv[:, :count].any()
    assert all(x.isfinite().all() for x in (o, dk, dv))
    # 0 times infinity is NaN, in the formula, too.
    assert dq.isfinite().all() or math.isinf(key)


def test_nan_stays_where_it_is():
    q, k, v = torch.randn(3, 2, 70, 16).unbind()
    q[0, 3, 5] = math.nan
    o = flash_forward(q, k, v, False)[0]
    assert o.isnan().any(-1).nonzero().tolist() == [[0, 3]]


def test_three_bfloat16_hold_all_bits():
    shape = (2, 3, 50, 20)
    x = torch.randn(shape) * 2.0 ** torch.randint(-90, 90, shape)
    tuning = tuning_for(x.dtype, 20, x.device).with_tiles(**BF16X3)
    tuning = dataclasses.replace(tuning, sm_count=0)
    layouts = [layout(x)] * 4
    launcher = Launcher(layouts, tuning, False, kernels=("bf16x3_forward",))
    split, *_ = launcher._sources((x, x, x))
    # Rows begin at multiples of 16 bytes.
    split = split.view(2, 3, 3, 50, 24)[..., :20].float()
    small = split[:, :, 2] + split[:, :, 1]
    assert torch.equal(small + split[:, :, 0], x)
