"""The closed forms against the model itself: its parameters, torch's FLOP counter, what lives in memory."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_probes import LiveBytes, saved_bytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems import accounting
from cs336_systems.attention.implementations import ATTENTION_PASSES
from cs336_systems.attention.plain import plain_attention
from cs336_systems.configs import MODEL_SIZES, ModelConfig, model_size
from cs336_systems.dtypes import DTYPES, torch_dtype
from cs336_systems.functional import cross_entropy
from cs336_systems.model import TransformerLM, build_model
from cs336_systems.optimizer import AdamW
from cs336_systems.training import checkpointing
from cs336_systems.training.steps import autocast
from labbook.timing import release_memory

TINY = model_size("tiny")
EVERY_SIZE = [config for sizes in MODEL_SIZES.values() for config in sizes.values()]
CPU = torch.device("cpu")

small_configs = st.builds(
    lambda heads, half_head, d_ff, layers, vocab: ModelConfig(
        "random", 0, heads * 2 * half_head, d_ff, layers, heads, vocab
    ),
    heads=st.integers(1, 4),
    half_head=st.integers(1, 8),
    d_ff=st.integers(1, 80),
    layers=st.integers(1, 3),
    vocab=st.integers(2, 90),
)


def a_batch(config: ModelConfig, batch_size: int, context_length: int, device: str = "cpu"):
    tokens = torch.randint(config.vocab_size, (2, batch_size, context_length), device=device)
    return tokens[0], tokens[1]


def run_pass(
    model: TransformerLM, tokens, targets, pass_: str, dtype: str, optimizer=None, plan=tuple
) -> None:
    """One step as the benchmark takes it, with blocks checkpointed by a plan."""
    device = tokens.device
    if pass_ == "forward":
        with torch.no_grad(), autocast(device, dtype):
            model(tokens)
        return
    model.zero_grad()
    with autocast(device, dtype):
        loss = cross_entropy(checkpointing.forward_with(model, plan, tokens), targets)
    loss.backward()
    if pass_ == "train_step":
        optimizer.step()


@pytest.mark.parametrize("config", EVERY_SIZE, ids=lambda config: config.label)
def test_parameters_of_every_size(config):
    model = build_model(config, 8, device="meta")
    assert accounting.parameter_count(config) == sum(p.numel() for p in model.parameters())


def test_parameter_breakdown_is_the_models_own():
    parts = dict.fromkeys(accounting.parameter_breakdown(TINY), 0)
    of = {"attn": "attention", "ffn": "feed_forward", "ln1": "norms", "ln2": "norms", "ln_final": "norms"}
    for name, parameter in build_model(TINY, 8, device="meta").named_parameters():
        part = next((of[piece] for piece in name.split(".") if piece in of), name.split(".")[0])
        parts[part] += parameter.numel()
    assert accounting.parameter_breakdown(TINY) == parts


@settings(max_examples=15)
@given(config=small_configs, batch_size=st.integers(1, 3), context_length=st.integers(2, 24))
def test_flops_are_those_of_torchs_counter(config, batch_size, context_length):
    model = build_model(config, context_length, device="meta")
    tokens, targets = a_batch(config, batch_size, context_length, "meta")
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(model(tokens), targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    shape = (config, batch_size, context_length)
    assert forward.get_total_flops() == accounting.forward_flops(*shape)
    assert backward.get_total_flops() == 2 * accounting.forward_flops(*shape)


def test_flops_breakdown_is_that_of_the_modules():
    model = build_model(TINY, 32, device="meta")
    tokens, _ = a_batch(TINY, 2, 32, "meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    of_module = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    parts = accounting.flops_breakdown(TINY, 2, 32)
    blocks = range(TINY.num_layers)
    assert parts["lm_head"] == of_module["TransformerLM.lm_head"]
    assert parts["feed_forward"] == sum(of_module[f"TransformerLM.layers.{i}.ffn"] for i in blocks)
    attention = sum(of_module[f"TransformerLM.layers.{i}.attn"] for i in blocks)
    names = ("attention_projections", "attention_scores", "attention_values")
    assert sum(parts[name] for name in names) == attention


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
def test_attention_flops_are_those_of_torchs_counter(pass_):
    q, k, v = (torch.randn(3, 40, 16, device="meta", requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        output = plain_attention(q, k, v, is_causal=True)
        forward = counter.get_total_flops()
        output.sum().backward()
        both = counter.get_total_flops()
    counted = {"forward": forward, "backward": both - forward, "forward_backward": both}
    assert accounting.attention_flops(3, 40, 16, pass_) == counted[pass_]


@settings(max_examples=20)
@given(
    config=small_configs,
    batch_size=st.integers(1, 3),
    context_length=st.integers(2, 24),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_activation_bytes_are_what_autograd_saves(config, batch_size, context_length, dtype):
    model = build_model(config, context_length)
    batch = a_batch(config, batch_size, context_length)
    with saved_bytes(*batch, *model.parameters(), *model.buffers()) as saved, autocast(CPU, dtype):
        cross_entropy(model(batch[0]), batch[1])
    assert accounting.activation_bytes(config, batch_size, context_length, dtype) == saved.total


def measured_peak(
    config: ModelConfig, batch_size: int, context_length: int, pass_: str, dtype: str, plan=tuple
) -> int:
    """Peak of the second step, on fake tensors: the real operations in their order, without the numbers."""
    with FakeTensorMode():
        model = build_model(config, context_length)
        batch = a_batch(config, batch_size, context_length)
        optimizer = AdamW(model.parameters())
        with LiveBytes(*batch, *model.parameters(), *model.buffers()) as memory:
            for _ in range(2 if pass_ == "train_step" else 1):
                run_pass(model, *batch, pass_, dtype, optimizer, plan)
    return memory.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pass_", ["forward", "forward_backward", "train_step"])
@pytest.mark.parametrize(
    ("size", "batch_size", "context_length", "vocab_size"),
    [
        ("small", 4, 16, 10_000),
        ("small", 4, 256, 10_000),
        ("small", 400, 16, 100),
        ("xl", 4, 512, 10_000),
        ("10B", 4, 128, 10_000),
        ("10B", 4, 2048, 10_000),
    ],
)
def test_peak_bytes_are_what_lives_at_once(size, batch_size, context_length, vocab_size, pass_, dtype):
    # A first and a last layer; those between them add what a whole model below adds.
    config = dataclasses.replace(model_size(size, 2026), num_layers=2, vocab_size=vocab_size)
    run = (config, batch_size, context_length, pass_, dtype)
    assert accounting.peak_bytes(*run) == pytest.approx(measured_peak(*run), rel=0.005)


PLANS = {
    "every 1": lambda blocks: checkpointing.every_k(blocks, 1),
    "recursive": checkpointing.recursive,
    "from start": checkpointing.from_start,
    "uneven": lambda blocks: (blocks[0], tuple(blocks[1:3]), (tuple(blocks[3:5]), blocks[5])),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("size", "context_length"), [("small", 256), ("xl", 2048)])
def test_peak_bytes_with_checkpoints_are_what_lives_at_once(size, context_length, plan, dtype):
    config = dataclasses.replace(model_size(size, 2026), num_layers=6)
    run = (config, 4, context_length, "forward_backward", dtype)
    expected = accounting.peak_bytes(*run, plan=plan(range(6)))
    assert expected == pytest.approx(measured_peak(*run, plan=plan), rel=0.002)


def an_attention_problem(batch_size: int, context_length: int, d_head: int, dtype: str):
    shape = (batch_size, context_length, d_head)
    return tuple(torch.randn(shape, dtype=torch_dtype(dtype), requires_grad=True) for _ in range(3))


@settings(max_examples=25)
@given(
    batch_size=st.integers(1, 4),
    context_length=st.integers(2, 40),
    d_head=st.integers(1, 24),
    dtype=st.sampled_from(sorted(DTYPES)),
    is_causal=st.booleans(),
)
def test_attention_saved_bytes_are_what_autograd_saves(batch_size, context_length, d_head, dtype, is_causal):
    q, k, v = an_attention_problem(batch_size, context_length, d_head, dtype)
    with saved_bytes() as saved:
        plain_attention(q, k, v, is_causal)
    expected = accounting.attention_saved_bytes(batch_size, context_length, d_head, dtype, is_causal)
    assert expected == saved.total


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pass_", ["forward", "forward_backward"])
@pytest.mark.parametrize(("context_length", "d_head"), [(256, 128), (1024, 16), (16384, 64)])
def test_attention_peak_bytes_are_what_lives_at_once(context_length, d_head, pass_, dtype, is_causal):
    with FakeTensorMode():
        q, k, v = an_attention_problem(8, context_length, d_head, dtype)
        output_gradient = torch.randn_like(q, requires_grad=False)
        inputs = (q, k, v, output_gradient) if pass_ == "forward_backward" else (q, k, v)
        with LiveBytes(*inputs) as memory, torch.set_grad_enabled(pass_ != "forward"):
            output = plain_attention(q, k, v, is_causal)
            if pass_ == "forward_backward":
                output.backward(output_gradient)
    expected = accounting.attention_peak_bytes(8, context_length, d_head, pass_, dtype, is_causal)
    assert expected == pytest.approx(memory.peak, rel=0.005)


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_counts_the_scores_not_masked_and_each_tensor_once(is_causal):
    scores = 3 * sum(1 for i in range(13) for j in range(13) if j <= i or not is_causal)
    assert accounting.flash_scores(3, 13, is_causal) == scores
    # 4 d a score forward, and with the backward 3.5 times that (Dao 2023, section 4.1).
    flops = {p: accounting.flash_flops(3, 13, 64, p, is_causal) for p in ATTENTION_PASSES}
    assert flops["forward"] == 4 * 64 * scores
    assert flops["forward_backward"] == flops["forward"] + flops["backward"] == 3.5 * flops["forward"]
    tensor, rows = 3 * 13 * 64 * 2, 3 * 13 * 4  # bfloat16 of q, float32 of a logsumexp
    assert accounting.flash_bytes(3, 13, 64) == 4 * tensor + rows
    assert accounting.flash_bytes(3, 13, 64, "backward") == 8 * tensor + rows
    assert accounting.flash_bytes(3, 13, 64, "forward_backward") == 12 * tensor + 2 * rows
    assert accounting.flash_bytes(3, 13, 64, dtype="float32") == 8 * tensor + rows


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: accounting.forward_flops(TINY, 0, 16), "batch_size.*0"),
        (lambda: accounting.activation_bytes(TINY, 1, 8, "fp8"), "fp8.*tf32"),
        (lambda: accounting.peak_bytes(TINY, 1, 8, "sideways"), "sideways.*train_step"),
        (lambda: accounting.peak_bytes(TINY, 1, 8, "backward", plan=((0, 1, 2),)), "3 blocks.*2"),
        (lambda: accounting.attention_flops(1, 8, 4, "train_step"), "train_step.*forward_backward"),
    ],
)
def test_refusals_name_what_is_given_and_what_is_allowed(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pass_", ["forward", "forward_backward", "train_step"])
def test_peak_bytes_are_what_the_allocator_saw(pass_, dtype):
    config = model_size("small")
    release_memory("cuda")  # workspaces of other tests' threads
    model = build_model(config, 512, device="cuda")
    batch = a_batch(config, 4, 512, "cuda")
    optimizer = AdamW(model.parameters())
    run_pass(model, *batch, pass_, dtype, optimizer)
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    run_pass(model, *batch, pass_, dtype, optimizer)
    measured = torch.cuda.memory_stats()["requested_bytes.all.peak"]  # before it rounds sizes up
    expected = accounting.peak_bytes(config, 4, 512, pass_, dtype)
    # Beyond the tensors: a workspace of cuBLAS for each of two threads, 32 MiB on Hopper.
    assert expected <= measured <= 1.002 * expected + 2 * 32 * 2**20
