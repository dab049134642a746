"""Bytes saved for backward, tensor by tensor."""

import pytest
import torch
from torch import nn

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from labbook.memory.saved import saved_bytes, saved_for_backward

BATCH, CONTEXT = 2, 16
CONFIG = model_size("tiny")


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, CONTEXT)


@pytest.fixture
def x():
    return torch.randn(BATCH, CONTEXT, CONFIG.d_model, requires_grad=True)


def test_shared_storages_count_once_and_parameters_never():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return x.exp() + (x @ self.weight) * (x.view(2, 4, 8) @ self.weight).view(8, 8)

    saved = saved_for_backward(Twice(), torch.randn(8, 8, requires_grad=True))
    # x is saved by both products; exp and the product of products save their results and operands.
    assert saved.size_bytes.tolist() == [256] * 4
    assert set(saved.operation) == {"exp", "matmul", "mul"}


def test_a_view_counts_as_the_storage_it_keeps_alive():
    saved = saved_for_backward(nn.Tanh(), torch.randn(4))
    assert saved.empty, "nothing requires a gradient, nothing is saved"
    x = torch.randn(100, requires_grad=True)
    sliced = nn.Module()
    sliced.forward = lambda x: x[:2].sin()
    assert saved_for_backward(sliced, x).size_bytes.tolist() == [400]


def test_what_a_block_saves(model, x):
    saved = saved_for_backward(model.layers[0], x)
    scores = BATCH * CONFIG.num_heads * CONTEXT**2 * 4
    attention = saved[saved.code.str.startswith(("attention/plain", "functional")) & (saved.module == "attn")]
    assert attention.size_bytes.max() == scores
    assert set(saved.module) >= {"ln1", "attn", "attn.q_proj", "ffn", "ffn.w2"}
    assert not saved.module.str.startswith("layers").any(), "modules are named within the block"


def test_flash_attention_saves_no_scores(x):
    block = build_model(CONFIG, CONTEXT, attention_implementation="flash_pytorch").layers[0]
    saved = saved_for_backward(block, x)
    flash = saved[saved.code.str.startswith("attention/")]
    assert len(flash) == 5, "q, k, v, o and one logsumexp"
    assert BATCH * CONFIG.num_heads * CONTEXT * 4 in set(flash.size_bytes)
    assert (flash.operation != "").all()


def test_sixteen_bits_halve_the_matmuls(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        saved = saved_for_backward(model.layers[0], x)
    assert set(saved[saved.operation == "linear"].dtype) == {"bfloat16"}


def test_bytes_of_a_function(x):
    """What two operations save counts once, and is alive until backward."""
    saved, in_use = saved_bytes(lambda: (x.exp() * x.exp()).sum(), [x])
    assert saved == 2 * x.nbytes, "both exponentials, each by exp and by mul"
    assert in_use == 3 * x.nbytes + 4
