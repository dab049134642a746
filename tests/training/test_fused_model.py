"""A model on the fused kernels, and on blocks with a backward by hand: the plain model's numbers."""

import copy
from functools import partial

import pytest
import torch
from tests.layouts import DEVICE
from tests.parallel.wrappers import train
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from cs336_systems.configs import ModelConfig
from cs336_systems.functional import cross_entropy
from cs336_systems.model import Linear, build_model
from cs336_systems.nvtx import recording
from cs336_systems.parallel import FSDP, launch
from labbook.memory import saved_for_backward

pytest.importorskip("triton")
from cs336_systems.training import fused_block
from cs336_systems.training.fused import use_fused_kernels
from cs336_systems.training.fused_block import KEEPABLE, kept_bytes, use_fused_blocks

CONFIG = ModelConfig("test", 2026, d_model=48, d_ff=80, num_layers=2, num_heads=3, vocab_size=97)
SEQUENCE = 37  # no tile divides it
KEEPS = ([(), ()], [KEEPABLE, KEEPABLE], [("qkv",), ("ab", "h")])
use_stacked_blocks = partial(use_fused_blocks, stacked=True)
over_changes = pytest.mark.parametrize(
    "use", [use_fused_kernels, use_fused_blocks, use_stacked_blocks]
)
over_blocks = pytest.mark.parametrize("use", [use_fused_blocks, use_stacked_blocks])


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
    names = dict(model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, [*model.parameters()]), strict=True))


def is_taken_apart(model) -> bool:
    """Whether the first block runs as one function."""
    calls, function, apply = [], fused_block.BlockFunction, fused_block.BlockFunction.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "apply", lambda *given: calls.append(1) or apply(*given))
        model.layers[0](torch.randn(2, SEQUENCE, CONFIG.d_model, device=DEVICE))
    return bool(calls)


@over_changes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_at_most_twice_autograds(use, dtype):
    plain, (tokens, targets) = plain_model(dtype), batch()
    exact_model = copy.deepcopy(plain).double()
    exact = gradients(exact_model, exact_model(tokens, targets))
    torchs, fused = (
        gradients(plain, cross_entropy(plain(tokens), targets)),
        use(use(copy.deepcopy(plain))),
    )
    assert fused.state_dict().keys() == plain.state_dict().keys()
    ours = gradients(fused, fused(tokens, targets))
    for name, wanted in exact.items():
        error, allowed = (
            (x[name].double() - wanted).norm() / wanted.norm() for x in (ours, torchs)
        )
        assert error < 2 * max(allowed, 1e-7), name
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(fused(tokens), plain(tokens), rtol=tolerance, atol=tolerance)


@over_changes
def test_in_autocast_as_the_plain_model(use):
    plain, (tokens, targets), losses = plain_model(), batch(), []
    for model in (plain, use(copy.deepcopy(plain))):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            losses.append(model(tokens, targets))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    for name, ours in model.named_parameters():  # stacked blocks have another order
        other = plain.get_parameter(name).grad
        assert (ours.grad - other).norm() <= 3e-2 * other.norm()


@over_blocks
def test_backward_of_a_block_in_autocast_and_twice(use):
    model = use(plain_model())
    model.layers[0].keep = KEEPABLE
    x = torch.randn(2, SEQUENCE, CONFIG.d_model, device=DEVICE, requires_grad=True)
    loss = model.layers[0](x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):  # its forward chose the dtypes
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(found, gradient)
    with pytest.raises(RuntimeError, match="BlockFunction has no second derivative"):
        torch.autograd.grad(loss + gradient.square().sum(), x)


@over_blocks
def test_what_is_kept_changes_no_bit(use):
    plain, (tokens, targets), results = plain_model(), batch(), []
    for keeps in KEEPS:
        model = use(copy.deepcopy(plain))
        for layer, keep in zip(model.layers, keeps, strict=True):
            layer.keep = keep
        results.append(gradients(model, model(tokens, targets)))
    with torch.autograd.graph.saved_tensors_hooks(
        torch.clone, torch.clone
    ):  # a and b are no neighbours now
        results.append(gradients(model, model(tokens, targets)))
    for other in results[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in results[0].items())


@over_blocks
@pytest.mark.parametrize("keep", [(), *([name] for name in KEEPABLE), KEEPABLE], ids=str)
def test_it_keeps_the_bytes_that_it_says(keep, use):
    block = use(plain_model()).layers[0]
    block.keep = keep
    x = torch.randn(2, SEQUENCE, CONFIG.d_model, device=DEVICE, requires_grad=True)
    said = kept_bytes(CONFIG, 2 * SEQUENCE, 4)
    assert saved_for_backward(block, x)["size_bytes"].sum() == sum(
        said[name] for name in ("always", *keep)
    )


def under_fsdp(context, stacked):
    """Blocks that keep little: the weights of the plain model on the whole batch."""

    def loss(model, rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(*torch.randint(CONFIG.vocab_size, (2, 1, SEQUENCE), generator=generator))

    torch.manual_seed(0)
    plain, calls = build_model(CONFIG, SEQUENCE), []
    fused, apply = use_fused_blocks(copy.deepcopy(plain), stacked), fused_block.BlockFunction.apply
    fused_block.BlockFunction.apply = lambda *given: calls.append(1) or apply(*given)
    fused.layers[0].keep, fused.layers[1].keep = ("h",), ("qkv",)
    wrapped = FSDP(fused, unit_types=("TransformerBlock",))
    train(context, plain, wrapped, loss, "fused", make=partial(torch.optim.SGD, lr=0.1))
    assert len(calls) == 4, "the blocks are taken apart"


@pytest.mark.parametrize("stacked", [False, True])
def test_under_fsdp_it_trains_as_one_process_does(stacked):
    launch(under_fsdp, 2, stacked, backend="gloo", timeout_s=200)


class LowRank(Linear):
    """A layer with a trained addition."""

    def __init__(self, layer):
        nn.Module.__init__(self)
        self.weight, shapes = layer.weight, ((4, layer.weight.shape[1]), (layer.weight.shape[0], 4))
        self.down, self.up = (nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes)

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


def twice(module, *given):
    return tuple(None if x is None else 2 * x for x in given[0])


CHANGES = {
    "an adapter": lambda model, block: setattr(block.attn, "v_proj", LowRank(block.attn.v_proj)),
    "an adapter at the head": lambda model, block: setattr(
        model, "lm_head", LowRank(model.lm_head)
    ),
    "a forward hook": lambda model, block: block.ffn.w2.register_forward_hook(
        lambda m, x, y: 2 * y
    ),
    "a pre-hook": lambda model, block: block.ln1.register_forward_pre_hook(twice),
    "a backward hook": lambda model, block: block.attn.register_full_backward_hook(twice),
    "a hook on the head": lambda model, block: model.lm_head.register_forward_hook(
        lambda m, x, y: 2 * y
    ),
    "a pre-hook on the head": lambda model, block: model.lm_head.register_forward_pre_hook(twice),
    "another forward": lambda model, block: setattr(block.attn.rope, "forward", lambda x: x),
    "a gate": lambda model, block: setattr(block.ffn, "gate", lambda a, b: a.relu() * b),
    "a norm": lambda model, block: setattr(block.ln2, "norm", lambda x, weight, eps: x * weight),
    "the last norm": lambda model, block: setattr(
        model.ln_final, "norm", lambda x, weight, eps: x * weight
    ),
    "a rotation": lambda model, block: setattr(block.attn.rope, "rotate", lambda x, cos, sin: -x),
    "a block": lambda model, block: setattr(block, "run", lambda block, x: block.ffn(x)),
}


@over_changes
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_the_users_own_stays(change, use):
    """Put there before the model is changed or after; else the block would be taken apart without it."""
    plain, (tokens, targets) = plain_model(), batch()
    before, after, results = copy.deepcopy(plain), use(copy.deepcopy(plain)), []
    for model in (plain, before, after):
        torch.manual_seed(0)
        change(model, model.layers[0])
    for model in (plain, use(before), after):
        loss = model(tokens, targets)
        results.append([loss, *torch.autograd.grad(loss, model.token_embeddings.weight)])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-4)


def test_which_blocks_are_taken_apart(monkeypatch):
    """Not in float64, nor with a class that is patched; ranges for profilers change nothing."""
    model = use_fused_blocks(plain_model())
    with recording(model):
        assert is_taken_apart(model)
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: 2 * forward(self, x))
    assert not is_taken_apart(model)
    with pytest.raises(TypeError, match="float64"):
        model.double().layers[0](torch.randn(2, SEQUENCE, CONFIG.d_model, device=DEVICE).double())


@over_blocks
def test_a_block_takes_one_sequence_and_as_many_positions_as_it_has(use):
    plain = plain_model()
    x, block = (
        torch.randn(SEQUENCE, CONFIG.d_model, device=DEVICE),
        use(copy.deepcopy(plain)).layers[0],
    )
    torch.testing.assert_close(block(x), plain.layers[0](x), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="38 positions; allowed: at most 37"):
        block(torch.randn(1, SEQUENCE + 1, CONFIG.d_model, device=DEVICE))


def test_compiled_traced_and_copied():
    model, (tokens, targets) = use_fused_blocks(plain_model()), batch()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    wanted = model(tokens, targets)
    torch.testing.assert_close(compiled(tokens, targets), wanted)
    traced = make_fx(lambda *given: model(*given))(tokens, targets)
    torch.testing.assert_close(traced(tokens, targets), wanted)
