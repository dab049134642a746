"""A block whose backward is written by hand: as right as autograd's, and it keeps what it says, no more."""

import copy

import fused_workers
import pytest
import torch

from cs336_systems.configs import ModelConfig
from cs336_systems.functional import cross_entropy
from cs336_systems.measure.saved_tensors import saved_for_backward
from cs336_systems.model import build_model
from cs336_systems.parallel import launch

pytest.importorskip("triton")
from cs336_systems.training.fused_block import KEEPABLE, kept_bytes, use_fused_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig("test", 2026, d_model=48, d_ff=80, num_layers=2, num_heads=3, vocab_size=97)
SEQUENCE = 37  # no tile divides it
KEEPS = ([(), ()], [KEEPABLE, KEEPABLE], [("qkv",), ("ab", "h")])


def plain_model(dtype=torch.float32):
    """Weights of a dtype, norms in float32, as FSDP has them."""
    model = build_model(CONFIG, SEQUENCE, device=DEVICE)
    for name, parameter in model.named_parameters():
        if "ln" not in name:
            parameter.data = parameter.data.to(dtype)
    return model


def batch():
    return torch.randint(CONFIG.vocab_size, (2, 2, SEQUENCE), device=DEVICE)


def gradients(model, loss):
    return dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, [*model.parameters()]), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_at_most_twice_autograds(dtype):
    plain, (tokens, targets) = plain_model(dtype), batch()
    exact_model = copy.deepcopy(plain).double()
    exact = gradients(exact_model, cross_entropy(exact_model(tokens), targets))
    torchs = gradients(plain, cross_entropy(plain(tokens), targets))
    fused = use_fused_blocks(copy.deepcopy(plain))
    ours = gradients(fused, fused(tokens, targets))
    for name, wanted in exact.items():
        error, allowed = ((x[name].double() - wanted).norm() / wanted.norm() for x in (ours, torchs))
        assert error < 2 * max(allowed, 1e-7), name


def test_what_is_kept_changes_no_bit():
    plain, (tokens, targets) = plain_model(), batch()
    results = []
    for keeps in KEEPS:
        model = use_fused_blocks(copy.deepcopy(plain))
        for layer, keep in zip(model.layers, keeps, strict=True):
            layer.keep = keep
        results.append(gradients(model, model(tokens, targets)))
    for other in results[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in results[0].items())


@pytest.mark.parametrize("keep", [(), *([name] for name in KEEPABLE), KEEPABLE], ids=str)
def test_it_keeps_the_bytes_that_it_says(keep):
    block = use_fused_blocks(plain_model()).layers[0]
    block.keep = keep
    x = torch.randn(2, SEQUENCE, CONFIG.d_model, device=DEVICE, requires_grad=True)
    said = kept_bytes(CONFIG, 2 * SEQUENCE, 4)
    assert saved_for_backward(block, x)["size_bytes"].sum() == sum(said[name] for name in ("always", *keep))


def test_under_fsdp_it_trains_as_one_process_does():
    launch(fused_workers.trains_as_one_process, 2, backend="gloo", timeout_s=200)


def test_a_sequence_beyond_the_context_length_is_refused():
    model = use_fused_blocks(plain_model())
    tokens = torch.zeros(1, SEQUENCE + 1, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="at most 37"):
        model(tokens, tokens)
