"""A model on the fused kernels: the plain model's logits, loss and gradients, and its state dict."""

import copy

import pytest
import torch

from cs336_systems.configs import ModelConfig
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model

pytest.importorskip("triton")
from cs336_systems.training.fused import FusedRMSNorm, LossHead, use_fused_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig("test", 2025, vocab_size=50, d_model=24, d_ff=36, num_layers=2, num_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_loss_and_gradients_of_the_plain_model(dtype):
    plain = build_model(CONFIG, 16, device=DEVICE)
    fused = use_fused_kernels(use_fused_kernels(copy.deepcopy(plain)))
    assert isinstance(fused.layers[1].ln2, FusedRMSNorm)
    assert isinstance(fused.lm_head, LossHead)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    ids, targets = torch.randint(50, (2, 3, 13), device=DEVICE)
    with torch.autocast(DEVICE, dtype=dtype, enabled=dtype != torch.float32):
        wanted = cross_entropy(plain(ids), targets)
        loss = fused(ids, targets)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
        torch.testing.assert_close(fused(ids), plain(ids), **tolerance)
    torch.testing.assert_close(loss, wanted, **tolerance)
    loss.backward(), wanted.backward()
    for ours, other in zip(fused.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - other.grad).norm() <= tolerance["rtol"] * other.grad.norm()
