"""The steps of writing FlashAttention: right answers pass, and of wrong ones the reason is named.

Those of single tiles are tried in test_notebook_steps.py, with the solutions of 24 and 25.
"""

import math

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this platform")

import triton
import triton.language as tl  # noqa: F401 - Triton looks for it

from cs336_systems import attention, checks


@triton.jit
def visit_to_come(q, k, v, visible, m, total, acc, scale_log2):
    raise NotImplementedError()


class Batchless(torch.autograd.Function):
    """Sequences laid end to end: all see the keys of the first."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return attention.plain_attention(q, k[:1].expand_as(k), v[:1].expand_as(v), is_causal)


def unscaled(q, k, v, is_causal=False):
    return attention.plain_attention(q * math.sqrt(q.shape[-1]), k, v, is_causal)


def in_tf32(q, k, v, is_causal=False):
    """With the ten bits of mantissa that TF32 keeps."""
    q, k, v = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, k, v))
    return attention.plain_attention(q, k, v, is_causal)


def greedy(q, k, v, is_causal=False):
    """Reads a row beyond the last and gives it no weight, which NaN survives."""
    beyond = q.as_strided((q.numel() + q.shape[-1],), (1,), q.storage_offset())[-1]
    return attention.plain_attention(q, k, v, is_causal) + 0 * beyond


class WithoutDelta(attention.FlashAttentionPyTorch):
    @staticmethod
    def backward(ctx, do):
        q, k, v, o, logsumexp = ctx.saved_tensors
        return *attention.flash_pytorch.flash_backward(do, q, k, v, 0 * o, logsumexp, ctx.is_causal), None


class KeepsScores(attention.FlashAttentionPyTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o = attention.FlashAttentionPyTorch.forward(ctx, q, k, v, is_causal)
        ctx.save_for_backward(*ctx.to_save[:-1], ctx.to_save[-1] / math.log(2))
        return o


def judged(checker, candidate, capsys):
    """(passed, what was shown with a cross)"""
    with checks.step("step") as check:
        checker(check, candidate)
    shown = capsys.readouterr().out.splitlines()
    return check.passed, " ".join(line for line in shown if line.startswith("✗"))


@pytest.mark.parametrize(
    ("checker", "candidate"),
    [
        (checks.check_forward, attention.FlashAttentionPyTorch.apply),
        (checks.check_backward, attention.FlashAttentionPyTorch.apply),
    ],
)
def test_a_right_answer_passes(checker, candidate, capsys):
    passed, crosses = judged(checker, candidate, capsys)
    assert passed, crosses


@pytest.mark.parametrize(
    ("checker", "candidate", "named"),
    [
        (checks.check_forward, Batchless.apply, "first sequence is right"),
        (checks.check_forward, unscaled, "agrees with attention"),
        (checks.check_forward, in_tf32, "TF32"),
        (checks.check_forward, greedy, "out of bounds"),
        (checks.check_backward, WithoutDelta.apply, "dQ"),
        (checks.check_backward, KeepsScores.apply, "natural logarithm"),
    ],
)
def test_a_wrong_answer_is_named(checker, candidate, named, capsys):
    passed, crosses = judged(checker, candidate, capsys)
    assert passed is False
    assert named in crosses


def test_a_kernel_that_is_not_written_is_not_yet(capsys):
    assert judged(checks.check_visit, visit_to_come, capsys)[0] is None
