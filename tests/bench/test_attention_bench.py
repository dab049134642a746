"""Benchmarks of attention: times, and the bytes saved for backward held against the closed form."""

import weakref

import pytest
import torch

from cs336_systems import accounting
from cs336_systems.bench import attention_bench as module
from cs336_systems.bench.attention_bench import (
    attention_key,
    benchmark_attention,
    saved_bytes,
    sweep_attention,
)
from cs336_systems.measure import host
from cs336_systems.measure.compiling import why_no_compile
from cs336_systems.measure.rows import load_rows, save_rows
from cs336_systems.measure.timing import MIB, release_memory

RUN = {"batch_size": 2, "context_length": 64, "d_head": 16, "device": "cpu", "warmup_steps": 1, "steps": 2}
PASSES = ("forward", "backward", "forward_backward")


@pytest.mark.parametrize("pass_", PASSES)
def test_each_pass_is_timed_and_saves_what_the_closed_form_says(pass_):
    values = benchmark_attention(**RUN, pass_=pass_)
    saved = accounting.attention_saved_bytes(2, 64, 16)
    output = 2 * 64 * 16 * 4
    assert (values["status"], values["steps"], values["compile_s"]) == ("ok", 2, None)
    assert values["saved_for_backward_mib"] * MIB == saved
    assert values["memory_before_backward_mib"] * MIB == saved + output


@pytest.mark.parametrize(("dtype", "is_causal"), [("bfloat16", False), ("float32", True), ("float16", True)])
def test_saved_bytes_follow_dtype_and_mask(dtype, is_causal):
    values = benchmark_attention(**RUN, dtype=dtype, is_causal=is_causal)
    assert values["saved_for_backward_mib"] * MIB == accounting.attention_saved_bytes(
        2, 64, 16, dtype, is_causal
    )


def test_flash_attention_saves_nothing_quadratic():
    saved = benchmark_attention(**RUN | {"context_length": 256}, implementation="flash_pytorch")
    linear = 4 * (4 * 2 * 256 * 16 + 2 * 256)  # q, k, v, o and one logsumexp a query
    assert saved["saved_for_backward_mib"] * MIB == linear


def test_a_storage_counts_once_however_often_it_is_saved():
    x = torch.randn(10, 10, requires_grad=True)
    saved, in_use = saved_bytes(lambda: (x * x.T).sum(), [x])
    assert saved == 400
    assert in_use == 404


def test_counting_leaves_nothing_behind():
    x, outputs = torch.randn(10, requires_grad=True), []

    def forward():
        y = x.exp()  # saves its own output
        outputs.append(weakref.ref(y))
        return y.sum()

    saved_bytes(forward, [x])
    assert outputs[0]() is None


def test_a_pass_does_what_it_says(monkeypatch):
    steps = {}

    def watch(step, *, prepare, **options):
        steps.update(step=step, prepare=prepare)
        return original(step, prepare=prepare, **options)

    original = module.time_steps
    monkeypatch.setattr(module, "time_steps", watch)
    benchmark_attention(**RUN, pass_="forward")
    output = steps["step"]()
    assert output.requires_grad, "a forward of training, which saves for backward"
    benchmark_attention(**RUN, pass_="backward")
    output = steps["prepare"]()
    leaves = [node.variable for node, _ in graph_leaves(output.grad_fn)]
    assert len(leaves) == 3
    assert all(leaf.grad is None for leaf in leaves)
    steps["step"](output)
    assert all(leaf.grad is not None for leaf in leaves)


def graph_leaves(node):
    leaves, stack, seen = [], [node], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append((node, None))
        stack.extend(next_node for next_node, _ in node.next_functions)
    return leaves


def test_the_sweep_goes_on_after_running_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    reference = module.attention

    def attention(q, k, v, **options):
        if q.shape[-2] == 128:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
        return reference(q, k, v, **options)

    monkeypatch.setattr(module, "attention", attention)
    options = {"batch_size": 1, "device": "cpu", "warmup_steps": 1, "steps": 2}
    for rows in sweep_attention(context_lengths=[128, 64], d_heads=[16, 32], **options):
        save_rows(rows, "pytorch_attention", machine="testbox")
    rows = load_rows("pytorch_attention", "testbox")
    assert len(rows) == 8
    assert set(rows[rows.context_length == 128].status) == {"oom"}
    assert set(rows[rows.context_length == 64].status) == {"ok"}


def test_what_would_not_fit_a_cpus_memory_is_skipped_untried(monkeypatch):
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2**30)
    values = benchmark_attention(**RUN | {"context_length": 16_384})
    assert (values["status"], values["mean_ms"]) == ("skipped", None)
    assert "GiB are free" in values["reason"]


def test_tf32_is_skipped_on_a_cpu():
    assert benchmark_attention(**RUN, dtype="tf32")["status"] == "skipped"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"pass_": "train_step"},
            "pass 'train_step' is unknown; allowed: forward, backward, forward_backward",
        ),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; allowed: float32, tf32"),
        ({"implementation": "fast"}, "implementation 'fast' is unknown; allowed: reference, .*compiled"),
        ({"context_length": 0}, "context_length"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        benchmark_attention(**RUN | arguments)


def test_the_key_names_everything_a_run_depends_on():
    options = {"dtype": "float32", "implementation": "reference", "warmup_steps": 1}
    key = attention_key(batch_size=2, context_length=64, d_head=16, pass_="forward", **options)
    assert key == {
        "implementation": "reference",
        "batch_size": 2,
        "context_length": 64,
        "d_head": 16,
        "is_causal": False,
        "dtype": "float32",
        "pass": "forward",
        "warmup_steps": 1,
    }


@pytest.mark.skipif(
    bool(why_no_compile(torch.device("cpu"))), reason="needs a C++ compiler, and there is none here"
)
def test_compiled_attention_is_timed_without_its_compilation():
    values = benchmark_attention(**RUN, pass_="forward", implementation="compiled")
    assert values["status"] == "ok", values["reason"]
    assert values["compile_s"] * 1e3 > 10 * values["p50_ms"]
    assert values["saved_for_backward_mib"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_gpu_memory_in_use_is_what_the_allocator_says(implementation):
    run = RUN | {"batch_size": 8, "context_length": 1024, "d_head": 64, "device": "cuda"}
    release_memory("cuda")
    before = torch.cuda.memory_allocated()
    values = benchmark_attention(**run, pass_="backward", implementation=implementation)
    assert values["status"] == "ok", values["reason"]
    assert torch.cuda.memory_allocated() == before
    assert values["saved_for_backward_mib"] <= values["memory_before_backward_mib"] * 1.001
    if implementation == "reference":
        saved = accounting.attention_saved_bytes(8, 1024, 64) / MIB
        assert values["saved_for_backward_mib"] == pytest.approx(saved, rel=0.001)
        assert values["memory_before_backward_mib"] == pytest.approx(saved + 2, rel=0.01)


@pytest.mark.gpu
def test_gpu_out_of_memory_is_a_status_and_the_next_one_runs():
    run = RUN | {"batch_size": 64, "d_head": 64, "device": "cuda"}
    assert benchmark_attention(**run | {"context_length": 65_536})["status"] == "oom"
    assert torch.cuda.memory_allocated() < 2**28
    assert benchmark_attention(**run | {"context_length": 256})["status"] == "ok"
