"""What is checked of attention: right answers pass, and of wrong ones the usual reason is named."""

import math

import pytest
import torch
from solutions import as_contiguous

from cs336_systems.attention import FlashAttentionPyTorch
from cs336_systems.attention.plain import plain_attention
from cs336_systems.checks import BASIC, check_attention, step


def mixed_batch(q, k, v, is_causal):
    """Batch and queries flattened together: every sequence sees the keys of the first."""
    return plain_attention(q, k[:1].expand_as(k), v[:1].expand_as(v), is_causal)


def in_tf32(q, k, v, is_causal):
    """With the ten bits of mantissa that TF32 keeps."""
    rounded = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, k, v))
    return plain_attention(*rounded, is_causal)


def without_strides(q, k, v, is_causal):
    return plain_attention(*map(as_contiguous, (q, k, v)), is_causal)


class KeepsLogsumexpOfBase2(FlashAttentionPyTorch):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o = FlashAttentionPyTorch.forward(ctx, q, k, v, is_causal)
        ctx.save_for_backward(*ctx.to_save[:-1], None, ctx.to_save[-1] / math.log(2))
        return o


@pytest.mark.parametrize("right", [plain_attention, FlashAttentionPyTorch.apply])
def test_accepts_what_is_right(right):
    table = check_attention(right)
    assert len(table) == 4 * len(BASIC)
    assert set(table.tensor) == {"O", "dQ", "dK", "dV"}
    assert (table.ratio <= 2).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (mixed_batch, "O of case 'full'"),
        (lambda q, k, v, c: plain_attention(q, k, v, False), "O of case 'causal'"),
        (lambda *qkvc: plain_attention(*qkvc) / 0, "O of case 'full'.*not finite"),
        (lambda q, k, v, c: plain_attention(q, k.detach(), v, c), "dK of case 'full' is missing"),
        (lambda *qkvc: plain_attention(*qkvc).mT, r"is \(3, 64, 128\), .*; wanted: \(3, 128, 64\)"),
        (without_strides, "O of .* by their strides"),
    ],
)
def test_names_what_is_wrong(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check_attention(wrong)


@pytest.mark.parametrize(
    ("checked", "candidate", "named"),
    [
        ("forward", FlashAttentionPyTorch.apply, ""),
        ("forward", in_tf32, "TF32"),
        ("backward", FlashAttentionPyTorch.apply, ""),
        ("backward", plain_attention, "0 saved tensors have shape"),
        ("backward", KeepsLogsumexpOfBase2.apply, "natural logarithm"),
    ],
)
def test_the_steps_name_what_is_wrong(checked, candidate, named, capsys):
    flash_steps = pytest.importorskip("cs336_systems.checks.flash_steps", exc_type=ImportError)
    with step("step") as check:
        getattr(flash_steps, f"check_{checked}")(check, candidate)
    shown = capsys.readouterr().out.splitlines()
    crosses = " ".join(line for line in shown if line.startswith("✗"))
    assert check.passed is not bool(named), crosses
    assert named in crosses
