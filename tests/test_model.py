"""The Transformer against an independent reading of the handout, and by its properties."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from cs336_systems.configs import model_size
from cs336_systems.functional import cross_entropy
from cs336_systems.model import Embedding, Linear, RMSNorm, TransformerLM
from cs336_systems.optimizer import AdamW

VOCABULARY = 50
LAYERS = 2
HEADS = 3
DIMENSIONS = {
    "vocab_size": VOCABULARY,
    "context_length": 16,
    "d_model": 24,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "d_ff": 40,
}


def a_model(**changes) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(**DIMENSIONS | changes)


def some_tokens(batch_size=3, sequence=16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (batch_size, sequence), generator=generator)


ATTENTION = [f"attn.{part}_proj" for part in ("q", "k", "v", "output")]
OF_A_BLOCK = ATTENTION + ["ln1", "ln2", "ffn.w1", "ffn.w2", "ffn.w3"]
HANDOUT_NAMES = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
for layer in range(LAYERS):
    HANDOUT_NAMES |= {f"layers.{layer}.{part}.weight" for part in OF_A_BLOCK}


def logits_by_the_handout(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """In float64, of PyTorch's own functions; positions are turned as complex numbers."""
    weights = {name: weight.double() for name, weight in weights.items()}

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[name], eps=1e-5)

    def turned(x):  # (..., positions, width of a head)
        pairs = x.unflatten(-1, (-1, 2)).contiguous()
        pairs = torch.view_as_complex(pairs)
        *_, positions, count = pairs.shape
        rates = 10_000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
        angles = torch.arange(positions)[:, None] * rates
        rotations = torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(pairs * rotations).flatten(-2)

    def heads(x, name):
        projection = x @ weights[name].T
        return projection.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def attention(x, layer):
        q, k, v = (heads(x, f"{layer}.attn.{name}_proj.weight") for name in "qkv")
        output = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        concatenated = output.transpose(1, 2).flatten(-2)
        return concatenated @ weights[f"{layer}.attn.output_proj.weight"].T

    def feed_forward(x, layer):
        w1, w2, w3 = (weights[f"{layer}.ffn.w{i}.weight"] for i in (1, 2, 3))
        gated = F.silu(x @ w1.T) * (x @ w3.T)
        return gated @ w2.T

    x = weights["token_embeddings.weight"][tokens]
    for i in range(LAYERS):
        layer = f"layers.{i}"
        x = x + attention(norm(x, f"{layer}.ln1.weight"), layer)
        x = x + feed_forward(norm(x, f"{layer}.ln2.weight"), layer)
    return norm(x, "ln_final.weight") @ weights["lm_head.weight"].T


def test_weights_by_the_handouts_names_load_and_give_the_handouts_logits():
    # Norm weights are ones after initialisation; anything else, so that a forgotten one shows.
    drawn = a_model().state_dict()
    assert set(drawn) == HANDOUT_NAMES
    weights = {name: w + 0.1 * torch.randn_like(w) for name, w in drawn.items()}
    model = a_model()
    tokens = some_tokens()
    model.load_state_dict(weights, strict=True)
    expected = logits_by_the_handout(weights, tokens)
    logits = model(tokens).double()
    assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    logits = model.double()(tokens)
    assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_autocast_computes_in_16_bit_and_keeps_parameters_and_gradients_in_32():
    dtype = torch.bfloat16
    model = a_model()
    tokens = some_tokens()
    seen = []
    block = model.layers[0]
    for module in (block.attn.q_proj, block, model.ln_final):
        module.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    with torch.autocast("cpu", dtype):
        logits = model(tokens)
        loss = cross_entropy(logits, tokens)
    loss.backward()
    assert seen == [dtype, torch.float32, torch.float32]  # projection, residual stream, norm
    assert logits.dtype == dtype
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_can_be_built_in_another_type():
    dtype = torch.bfloat16
    for model in (a_model(dtype=dtype), a_model().to(dtype)):
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model(some_tokens()).dtype == dtype


def test_a_meta_model_costs_nothing_and_is_filled_later():
    """By drawing or by given weights; the rotary tables are not among them."""
    direct = a_model()

    def draw(model):
        torch.manual_seed(0)
        for module in model.to_empty(device="cpu").modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def load(model):
        model.to_empty(device="cpu").load_state_dict(direct.state_dict())

    def assign(model):
        model.load_state_dict(direct.state_dict(), assign=True)

    expected = direct(some_tokens())
    for fill in (draw, load, assign):
        later = a_model(device="meta")
        assert all(parameter.is_meta for parameter in later.parameters())
        assert all(buffer.is_meta for buffer in later.buffers())
        fill(later)
        assert_close(later(some_tokens()), expected, rtol=0, atol=0)
        assert not any(buffer.is_meta for buffer in later.buffers())


def test_what_is_float32_does_not_follow_the_default_dtype():
    """Model, loss, optimizer: the same numbers under another default. Kernels have a test of their own."""

    def results():
        model = a_model(dtype=torch.float32)
        tokens = some_tokens()
        loss = cross_entropy(model(tokens), tokens)
        loss.backward()
        AdamW(model.parameters()).step()
        tensors = [loss]
        tensors += model.parameters()
        tensors += model.buffers()
        return tensors

    wanted = results()
    torch.set_default_dtype(torch.bfloat16)
    try:
        under_another = results()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(under_another, wanted, rtol=0, atol=0)


def test_weights_are_drawn_from_truncated_normals():
    torch.manual_seed(0)
    # What cutting at three standard deviations leaves of one.
    left = 0.98658
    linear = Linear(300, 500)
    embedding = Embedding(400, 400)
    for module, std in ((linear, math.sqrt(2 / 800)), (embedding, 1.0)):
        weight = module.weight.detach().double()
        assert weight.std() == pytest.approx(left * std, rel=0.01)
        assert abs(weight.mean()) < 0.015 * std
        assert 2.8 * std < weight.abs().max() <= 3.01 * std
    assert torch.equal(RMSNorm(7).weight, torch.ones(7))


def mismatched_loss():
    targets = torch.zeros(3, 2, dtype=torch.int64)
    return cross_entropy(torch.zeros(2, 3, 7), targets)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: a_model(num_heads=5), "d_model=24, num_heads=5"),
        (lambda: a_model(num_heads=8), "d_head.*3"),
        (lambda: a_model(num_layers=0), "num_layers.*0"),
        (lambda: a_model()(some_tokens(1, 17)), r"17.*16"),
        (lambda: a_model(attention_implementation="magic")(some_tokens()), "magic"),
        (mismatched_loss, r"\(2, 3\).*\(3, 2\)"),
        (lambda: model_size("tiny", 2024), "2024.*2025, 2026"),
        (lambda: model_size("2.7B", 2026), "2026.*2.7B.*tiny.*10B"),
    ],
)
def test_what_cannot_be_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
