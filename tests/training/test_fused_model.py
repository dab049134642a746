"""A model on the fused kernels, and on blocks with a backward by hand: the plain model's numbers."""

import copy
from functools import partial

import pytest
import torch
from tests.layouts import DEVICE
from tests.parallel.wrappers import train
from torch import nn
from torch.autograd import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

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

CONFIG = ModelConfig(
    "test",
    2026,
    d_model=48,
    d_ff=80,
    num_layers=2,
    num_heads=3,
    vocab_size=97,
)
SEQUENCE = 37  # no tile divides it
# Of two blocks.
KEEPS = [("", ""), ("qkv h ab", "qkv h ab"), ("qkv", "ab h")]
close = partial(assert_close, rtol=1e-4, atol=1e-4)
over_changes = pytest.mark.parametrize("use", [use_fused_kernels, use_fused_blocks])


def plain_model(dtype=torch.float32):
    """Weights of a dtype, norms in float32, as FSDP has them."""
    model = build_model(CONFIG, SEQUENCE, device=DEVICE)
    for name, parameter in model.named_parameters():
        if "ln" not in name:
            parameter.data = parameter.data.to(dtype)
    return model


def batch():
    return torch.randint(CONFIG.vocab_size, (2, 2, SEQUENCE), device=DEVICE)


def hidden(*, requires_grad=False):
    shape = (2, SEQUENCE, CONFIG.d_model)
    return torch.randn(shape, device=DEVICE, requires_grad=requires_grad)


def gradients(model, loss):
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, grad(loss, parameters.values()), strict=True))


def count_calls(patch):
    """How often a block ran as one function, a list that grows."""
    calls = []
    apply = fused_block.BlockFunction.apply

    def counted(*arguments):
        calls.append(1)
        return apply(*arguments)

    patch.setattr(fused_block.BlockFunction, "apply", counted)
    return calls


def is_taken_apart(model) -> bool:
    """Whether the first block runs as one function."""
    with pytest.MonkeyPatch.context() as patch:
        calls = count_calls(patch)
        model.layers[0](hidden())
    return bool(calls)


@over_changes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_at_most_twice_autograds(use, dtype):
    plain = plain_model(dtype)
    tokens, targets = batch()
    exact_model = copy.deepcopy(plain).double()
    exact = gradients(exact_model, exact_model(tokens, targets))
    torchs = gradients(plain, cross_entropy(plain(tokens), targets))
    fused = use(use(copy.deepcopy(plain)))
    assert fused.state_dict().keys() == plain.state_dict().keys()
    ours = gradients(fused, fused(tokens, targets))
    for name, wanted in exact.items():
        allowed = (torchs[name] - wanted).norm() / wanted.norm()
        error = (ours[name] - wanted).norm() / wanted.norm()
        assert error < 2 * max(allowed, 1e-7), name
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert_close(fused(tokens), plain(tokens), rtol=tolerance, atol=tolerance)


@over_changes
def test_in_autocast_as_the_plain_model(use):
    plain = plain_model()
    fused = use(copy.deepcopy(plain))
    tokens, targets = batch()
    losses = []
    for model in (plain, fused):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            losses.append(model(tokens, targets))
        losses[-1].backward()
    assert_close(*losses, rtol=1e-2, atol=1e-2)
    # In one order, by which an optimizer's state is saved.
    for (name, ours), (same_name, theirs) in zip(
        fused.named_parameters(), plain.named_parameters(), strict=True
    ):
        other = theirs.grad
        assert name == same_name
        assert (ours.grad - other).norm() <= 3e-2 * other.norm()


def test_backward_of_a_block_in_autocast_and_twice():
    model = use_fused_blocks(plain_model())
    model.layers[0].keep = KEEPABLE
    x = hidden(requires_grad=True)
    loss = model.layers[0](x).square().sum()
    (gradient,) = grad(loss, x, create_graph=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):  # its forward chose the dtypes
        (found,) = grad(loss, x, retain_graph=True)
    assert torch.equal(found, gradient)
    with pytest.raises(RuntimeError, match="BlockFunction has no second derivative"):
        grad(loss + gradient.square().sum(), x)


def test_what_is_kept_changes_no_bit():
    plain = plain_model()
    tokens, targets = batch()
    results = []
    for keeps in KEEPS:
        model = use_fused_blocks(copy.deepcopy(plain))
        for layer, keep in zip(model.layers, keeps, strict=True):
            layer.keep = keep.split()
        results.append(gradients(model, model(tokens, targets)))
    # Copies: a and b are no neighbours now.
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        results.append(gradients(model, model(tokens, targets)))
    for other in results[1:]:
        for name, gradient in results[0].items():
            assert torch.equal(other[name], gradient), name


@pytest.mark.parametrize("keep", ["", "h", "qkv ab"])
def test_it_keeps_the_bytes_that_it_says(keep):
    block = use_fused_blocks(plain_model()).layers[0]
    block.keep = keep.split()
    sizes = kept_bytes(CONFIG, 2 * SEQUENCE, 4)
    expected = sizes["always"] + sum(sizes[name] for name in block.keep)
    saved = saved_for_backward(block, hidden(requires_grad=True))
    assert saved["size_bytes"].sum() == expected


def under_fsdp(context):
    """Blocks that keep little: the weights of the plain model on the whole batch."""

    def loss(model, rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        shape = (2, 1, SEQUENCE)
        return model(*torch.randint(CONFIG.vocab_size, shape, generator=generator))

    torch.manual_seed(0)
    plain = build_model(CONFIG, SEQUENCE)
    fused = use_fused_blocks(copy.deepcopy(plain))
    for layer, keep in zip(fused.layers, ("h", "qkv"), strict=True):
        layer.keep = (keep,)
    wrapped = FSDP(fused, unit_types=("TransformerBlock",))
    for layer in fused.layers:
        is_w2_last = layer.ffn.w3.weight.data_ptr() < layer.ffn.w2.weight.data_ptr()
        assert is_w2_last, "w3 is to be gathered next to w1"
    with pytest.MonkeyPatch.context() as patch:
        calls = count_calls(patch)
        train(context, plain, wrapped, loss, "fused", make=partial(torch.optim.SGD, lr=0.1))
    assert len(calls) == 4, "the blocks are taken apart"


def test_under_fsdp_it_trains_as_one_process_does():
    launch(under_fsdp, 2, backend="gloo", timeout_s=200)


class Adapted(Linear):
    """Another kind of layer."""

    def __init__(self, layer):
        nn.Module.__init__(self)
        self.weight = layer.weight

    def forward(self, x):
        return 2 * super().forward(x)


def adapter(model, name):
    model.set_submodule(name, Adapted(model.get_submodule(name)))


def forward_hook(model, name):
    model.get_submodule(name).register_forward_hook(lambda module, x, y: 2 * y)


def backward_hook(model, name):
    def hook(module, of_inputs, of_outputs):
        return (2 * of_inputs[0],)

    model.get_submodule(name).register_full_backward_hook(hook)


def attribute(model, name, function):
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, function)


CHANGES = [
    (adapter, "layers.0.attn.v_proj"),
    (forward_hook, "layers.0.ffn.w2"),
    (forward_hook, "lm_head"),
    (backward_hook, "layers.0.attn"),
    (partial(attribute, function=lambda x, weight, eps: x * weight), "layers.0.ln2.norm"),
    (partial(attribute, function=lambda x, cos, sin: -x), "layers.0.attn.rope.rotate"),
    (partial(attribute, function=lambda a, b: a.relu() * b), "layers.0.ffn.gate"),
    (partial(attribute, function=lambda block, x: block.ffn(x)), "layers.0.run"),
]


@over_changes
@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_what_is_the_users_own_stays(change, name, use):
    """Put there before the model is changed or after; else the block would be taken apart without it."""
    plain = plain_model()
    before = copy.deepcopy(plain)
    after = use(copy.deepcopy(plain))
    for model in (plain, before, after):
        change(model, name)
    tokens, targets = batch()
    results = []
    for model in (plain, use(before), after):
        loss = model(tokens, targets)
        (gradient,) = grad(loss, model.token_embeddings.weight)
        results.append((loss, gradient))
    close(results[1], results[0])
    close(results[2], results[0])


def test_which_blocks_are_taken_apart(monkeypatch):
    """Not in float64, nor with a class that is patched; ranges for profilers change nothing."""
    model = use_fused_blocks(plain_model())
    with recording(model):
        assert is_taken_apart(model)
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: 2 * forward(self, x))
    assert not is_taken_apart(model)
    with pytest.raises(TypeError, match="float64"):
        model.double().layers[0](hidden().double())


def test_a_block_takes_one_sequence_and_as_many_positions_as_it_has():
    plain = plain_model()
    block = use_fused_blocks(copy.deepcopy(plain)).layers[0]
    x = hidden()[0]
    close(block(x), plain.layers[0](x))
    with pytest.raises(ValueError, match="38 positions; allowed: at most 37"):
        block(torch.randn(1, SEQUENCE + 1, CONFIG.d_model, device=DEVICE))


def test_compiled_traced_and_copied():
    model = use_fused_blocks(plain_model())
    tokens, targets = batch()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    wanted = model(tokens, targets)
    assert_close(compiled(tokens, targets), wanted)
    traced = make_fx(lambda *batch: model(*batch))(tokens, targets)
    # From torch 2.15 on a traced detach() keeps the graph, in which `out=` is refused.
    with torch.no_grad():
        assert_close(traced(tokens, targets), wanted)
