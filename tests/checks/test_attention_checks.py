"""check_attention accepts what is right, and names what is wrong with the mistakes that people make."""

import math

import pytest
import torch

from cs336_systems.attention.plain import causal_mask, plain_attention
from cs336_systems.checks import BASIC, AttentionCase, check_attention, check_logsumexp


def visible(scores):
    return causal_mask(*scores.shape[-2:], device=scores.device)


def mixed_batch(q, k, v, is_causal):
    """Batch and queries flattened together: every sequence sees the keys of the first."""
    return plain_attention(q, k[:1].expand_as(k), v[:1].expand_as(v), is_causal)


def mask_of_the_wrong_side(q, k, v, is_causal):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(~visible(scores).mT, -1e4)
    return scores.softmax(-1) @ v


def without_a_maximum(q, k, v, is_causal):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~visible(scores), -math.inf).exp() if is_causal else scores.exp()
    return p / p.sum(-1, keepdim=True) @ v


def in_float16(q, k, v, is_causal):
    return plain_attention(q.half(), k.half(), v.half(), is_causal).to(q.dtype)


def without_a_gradient_for_k(q, k, v, is_causal):
    return plain_attention(q, k.detach(), v, is_causal)


def of_another_shape(q, k, v, is_causal):
    return plain_attention(q, k, v, is_causal).mT


def of_another_dtype(q, k, v, is_causal):
    return plain_attention(q, k, v, is_causal).double()


def test_accepts_what_is_right():
    table = check_attention(plain_attention)
    assert len(table) == 4 * len(BASIC)
    assert set(table.tensor) == {"O", "dQ", "dK", "dV"}
    assert (table.ratio <= 2).all()


def test_takes_a_name_of_the_registry():
    assert len(check_attention("flash_pytorch", cases=BASIC[:1])) == 4
    with pytest.raises(ValueError, match=r"'flash'.*flash_pytorch"):
        check_attention("flash")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (mixed_batch, "O of case 'full'.*batch and queries flattened together"),
        (mask_of_the_wrong_side, "O of case 'causal'"),
        (without_a_maximum, "O of case 'large scores'.*not finite"),
        (in_float16, "O of case 'full'.*allowed"),
        (without_a_gradient_for_k, "dK of case 'full' is missing"),
        (of_another_shape, r"is \(3, 64, 128\), .*; wanted: \(3, 128, 64\)"),
        (of_another_dtype, "torch.float64; wanted: .*torch.float32"),
    ],
)
def test_names_what_is_wrong(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check_attention(wrong)


def test_a_first_tile_that_weighs_nothing_is_asked_of_libraries():
    def online(q, k, v, is_causal):
        m, total, acc = torch.tensor(-torch.inf), 0, 0
        for first in range(0, k.shape[-2], 64):
            s = q @ k[..., first : first + 64, :].mT / math.sqrt(q.shape[-1])
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, correction = (s - m_new).exp(), (m - m_new).exp()
            total = correction * total + p.sum(-1, keepdim=True)
            acc, m = correction * acc + p @ v[..., first : first + 64, :], m_new
        return acc / total

    check_attention(online, cases=BASIC[:1])
    with pytest.raises(AssertionError, match=r"not finite: .* subtract 0"):
        check_attention(online, cases=[AttentionCase("padding first", n_keys=400, n_padding=260)])


class SavesLogsumexp(torch.autograd.Function):
    base = 1.0  # of the logarithm that is saved: 1 for the natural one

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~visible(scores), -math.inf)
        ctx.save_for_backward(q, k, v, scores.logsumexp(-1) * SavesLogsumexp.base)
        return scores.softmax(-1) @ v

    @staticmethod
    def backward(ctx, do):
        raise NotImplementedError


def test_logsumexp_is_natural_and_alone(monkeypatch):
    check_logsumexp(SavesLogsumexp.apply)
    monkeypatch.setattr(SavesLogsumexp, "base", math.log2(math.e))
    with pytest.raises(AssertionError, match="natural logarithm"):
        check_logsumexp(SavesLogsumexp.apply)
    with pytest.raises(AssertionError, match="0 saved tensors have shape"):
        check_logsumexp(plain_attention)
