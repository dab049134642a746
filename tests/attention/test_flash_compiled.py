"""The handout's pair: Triton forward, compiled PyTorch backward."""

import pytest
import torch

from cs336_systems.attention import flash_pytorch
from cs336_systems.bench.attention_bench import benchmark_attention
from cs336_systems.checks.attention_checks import AttentionCase, check_attention, check_logsumexp

pytest.importorskip("triton")
from cs336_systems.attention import flash_compiled
from cs336_systems.attention.flash_compiled import FlashAttentionCompiled

CASES = [
    AttentionCase("causal", is_causal=True),
    AttentionCase("odd lengths, heads", leading=(2, 3), n_queries=70, n_keys=51, d=24),
]


def test_uncompiled_it_is_right(monkeypatch):
    """What compiling must not change; compiling itself is for a GPU to test, a CPU takes too long over it."""
    monkeypatch.setattr(flash_compiled, "compiled_backward", lambda: flash_pytorch.flash_backward)
    check_attention(FlashAttentionCompiled.apply, cases=CASES)
    check_logsumexp(FlashAttentionCompiled.apply)


def test_it_can_be_measured(monkeypatch):
    monkeypatch.setattr(flash_compiled, "compiled_backward", lambda: flash_pytorch.flash_backward)
    size = {"batch_size": 1, "context_length": 32, "d_head": 16, "warmup_steps": 0, "steps": 1}
    values = benchmark_attention(**size, pass_="backward", implementation="flash_compiled", device="cpu")
    assert values["status"] in ("ok", "skipped"), values["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_it_is_right(dtype):
    check_attention(FlashAttentionCompiled.apply, cases=CASES, dtype=dtype)
