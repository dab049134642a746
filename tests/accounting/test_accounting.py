"""The closed forms against the model itself: its parameters, torch's FLOP counter, what lives in memory."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_probes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems import accounting
from cs336_systems.attention.plain import plain_attention
from cs336_systems.configs import MODEL_SIZES, ModelConfig, model_size
from cs336_systems.dtypes import DTYPES, torch_dtype
from cs336_systems.model import build_model
from cs336_systems.training import ModelSteps, checkpointing
from labbook.memory import storage_bytes

EVERY_SIZE = [config for sizes in MODEL_SIZES.values() for config in sizes.values()]
over_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
PASSES = ("forward", "forward_backward", "train_step")


@st.composite
def random_configs(draw):
    heads = draw(st.integers(1, 4))
    width = draw(st.integers(1, 8)) * 2 * heads
    d_ff = draw(st.integers(1, 80))
    layers = draw(st.integers(1, 3))
    vocabulary = draw(st.integers(2, 90))
    return ModelConfig("random", 0, width, d_ff, layers, heads, vocabulary)


a_config = random_configs()
a_batch_size = st.integers(1, 3)
a_length = st.integers(2, 24)
a_dtype = st.sampled_from(sorted(DTYPES))


def steps_of(config, batch_size, context_length, dtype="float32", device="cpu", **how):
    model = build_model(config, context_length, device=device)
    return ModelSteps(model, batch_size, context_length, dtype, **how)


def saved_bytes(run, *known):
    """Bytes of the storages that autograd saves, apart from those of tensors that are known."""
    saved = list(known)

    def on_saved(x):
        saved.append(x)
        return x

    with saved_tensors_hooks(on_saved, lambda x: x):
        output = run()
    assert output.requires_grad
    return storage_bytes(saved) - storage_bytes(known)


@pytest.mark.parametrize("config", EVERY_SIZE, ids=lambda config: config.label)
def test_parameters_of_every_size(config):
    model = build_model(config, 8, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert accounting.parameter_count(config) == sum(sizes.values())
    breakdown = accounting.parameter_breakdown(config)
    for part, piece in (("attention", ".attn."), ("feed_forward", ".ffn."), ("norms", "ln")):
        inside = [n for name, n in sizes.items() if piece in name]
        assert breakdown[part] == sum(inside)


@settings(max_examples=15)
@given(a_config, a_batch_size, a_length)
def test_flops_are_those_of_torchs_counter(config, batch_size, context_length):
    steps = steps_of(config, batch_size, context_length, device="meta")
    with FlopCounterMode(display=False) as forward:
        loss = steps.loss()
    with FlopCounterMode(display=False) as backward:
        steps.backward(loss)
    flops = accounting.forward_flops(config, batch_size, context_length)
    assert forward.get_total_flops() == flops
    assert backward.get_total_flops() == 2 * flops


@settings(max_examples=20)
@given(a_config, a_batch_size, a_length, a_dtype)
def test_activation_bytes_are_what_autograd_saves(config, batch_size, context_length, dtype):
    steps = steps_of(config, batch_size, context_length, dtype)
    parameters = steps.tensors()["parameters"]
    saved = saved_bytes(steps.loss, steps.tokens, steps.targets, *parameters)
    assert accounting.activation_bytes(config, batch_size, context_length, dtype) == saved


def measured_peak(config, batch_size, context_length, pass_, dtype, **how):
    """Peak of the second step, on fake tensors: the real operations in their order, without the numbers."""
    # Which numbers the weights are makes no difference.
    with FakeTensorMode(), patch("cs336_systems.model._truncated_normal_", lambda *_, **__: None):
        steps = steps_of(config, batch_size, context_length, dtype, **how)
        parameters = steps.tensors()["parameters"]
        with LiveBytes(steps.tokens, steps.targets, *parameters) as memory:
            for _ in range(2 if pass_ == "train_step" else 1):
                getattr(steps, pass_)()
    return memory.peak


@over_dtypes
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    ("size", "batch_size", "context_length", "vocab_size"),
    [
        ("small", 4, 256, 10_000),
        ("small", 400, 16, 100),
        ("xl", 4, 512, 10_000),
        ("10B", 4, 128, 10_000),
        ("10B", 4, 2048, 10_000),
    ],
)
def test_peak_bytes_are_what_lives_at_once(
    size, batch_size, context_length, vocab_size, pass_, dtype
):
    # A first and a last layer; those between them add what a whole model below adds.
    config = model_size(size, 2026)
    config = dataclasses.replace(config, num_layers=2, vocab_size=vocab_size)
    run = (config, batch_size, context_length, pass_, dtype)
    expected = accounting.peak_bytes(*run)
    assert expected == pytest.approx(measured_peak(*run), rel=0.005)


def test_the_largest_weight_may_be_one_of_attentions():
    config = ModelConfig("narrow", 0, 512, 64, 2, 8, 50)
    run = (config, 1, 64, "train_step", "float32")
    expected = accounting.peak_bytes(*run)
    assert expected == pytest.approx(measured_peak(*run), rel=0.005)


def uneven(blocks):
    first, *segment, a, b, last = blocks
    nested = ((a, b), last)
    return (first, tuple(segment), nested)


POLICIES = {name: checkpointing.policy(name) for name in ("every 1", "recursive", "from start")}
POLICIES["uneven"] = uneven


@over_dtypes
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(("size", "context_length"), [("small", 256), ("xl", 2048)])
def test_peak_bytes_with_checkpoints_are_what_lives_at_once(size, context_length, policy, dtype):
    config = dataclasses.replace(model_size(size, 2026), num_layers=6)
    run = (config, 4, context_length, "forward_backward", dtype)
    expected = accounting.peak_bytes(*run, schedule=policy(range(6)))
    peak = measured_peak(
        *run, call=lambda model, tokens: checkpointing.forward_with(model, policy, tokens)
    )
    assert expected == pytest.approx(peak, rel=0.002)


@pytest.mark.parametrize("is_causal", [False, True])
@over_dtypes
@pytest.mark.parametrize("pass_", ["forward", "forward_backward"])
@pytest.mark.parametrize(
    ("context_length", "d_head"),
    [
        (256, 128),
        (1024, 16),
        (16384, 64),
    ],
)
def test_attention_peak_bytes_are_what_lives_at_once(
    context_length, d_head, pass_, dtype, is_causal
):
    shape = (8, context_length, d_head)
    options = {"dtype": torch_dtype(dtype), "requires_grad": True}
    with FakeTensorMode():
        inputs = q, k, v = [torch.randn(shape, **options) for _ in range(3)]
        output_gradient = torch.randn_like(q, requires_grad=False)
        backward = pass_ == "forward_backward"
        if backward:
            inputs.append(output_gradient)
        with LiveBytes(*inputs) as memory, torch.set_grad_enabled(backward):
            output = plain_attention(q, k, v, is_causal)
            if backward:
                output.backward(output_gradient)
    alive = accounting.attention_peak_breakdown(*shape, pass_, dtype, is_causal)
    assert sum(alive.values()) == pytest.approx(memory.peak, rel=0.005)


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_counts_the_scores_not_masked(is_causal):
    visible = torch.ones(13, 13)
    if is_causal:
        visible = visible.tril()
    scores = 3 * int(visible.sum())
    flops = accounting.flash_flops(3, 13, 64, is_causal=is_causal)
    assert accounting.flash_scores(3, 13, is_causal) == scores
    assert flops == 4 * 64 * scores
