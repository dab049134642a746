"""Benchmarks of attention: times, and the bytes saved for backward held against the closed form."""

import pytest
import torch

from cs336_systems import accounting
from cs336_systems.attention import plain
from cs336_systems.bench.attention_bench import sweep_attention
from cs336_systems.dtypes import torch_dtype
from labbook.timing import MIB, release_memory

RUN = {"batch_size": 2, "context_length": 64, "d_head": 16, "device": "cpu", "warmup_steps": 1, "steps": 2}
PLURALS = {"context_length": "context_lengths", "d_head": "d_heads", "pass_": "passes", "dtype": "dtypes"}
PLURALS |= {"implementation": "implementations"}


def benchmark_attention(**options) -> dict:
    """The row of one pass at one size."""
    sizes = {PLURALS[name]: [value] for name, value in options.items() if name in PLURALS}
    others = {name: value for name, value in options.items() if name not in PLURALS}
    ((row,),) = sweep_attention(**{"passes": ["forward"]} | sizes | others)
    return row


@pytest.mark.parametrize(
    ("pass_", "dtype", "is_causal"),
    [("forward", "float32", False), ("backward", "bfloat16", False), ("forward_backward", "float16", True)],
)
def test_each_pass_is_timed_and_saves_what_the_closed_form_says(pass_, dtype, is_causal):
    row = benchmark_attention(**RUN, pass_=pass_, dtype=dtype, is_causal=is_causal)
    saved = accounting.attention_saved_bytes(2, 64, 16, dtype, is_causal)
    output = 2 * 64 * 16 * torch_dtype(dtype).itemsize
    assert (row["status"], row["steps"], row["pass"], row["is_causal"]) == ("ok", 2, pass_, is_causal)
    assert row["saved_for_backward_mib"] * MIB == saved
    assert row["memory_before_backward_mib"] * MIB == saved + output


def test_the_sweep_goes_on_after_running_out_of_memory(monkeypatch):
    def softmax(scores, dim):
        if scores.shape[-1] == 128:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
        return torch.softmax(scores, dim)

    monkeypatch.setattr(plain, "softmax", softmax)
    options = {"batch_size": 1, "device": "cpu", "warmup_steps": 1, "steps": 2}
    cells = list(sweep_attention(context_lengths=[128, 64], d_heads=[16, 32], **options))
    assert [row["status"] for rows in cells for row in rows] == ["oom", "oom", "ok", "ok"] * 2
    assert "8.00 GiB" in cells[0][0]["reason"]


def test_what_cannot_run_is_skipped_with_its_reason():
    too_large = benchmark_attention(**RUN | {"context_length": 2**20})  # 48 TB
    assert (too_large["status"], too_large["mean_ms"]) == ("skipped", None)
    assert "GiB" in too_large["reason"]
    assert "TF32" in benchmark_attention(**RUN, dtype="tf32")["reason"]
    assert "16-bit" in benchmark_attention(**RUN, implementation="sdpa_cudnn")["reason"]


WRONG = {"pass_": "train_step", "dtype": "int8", "implementation": "fast", "context_length": 0, "steps": 0}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_a_wrong_argument_is_refused_by_value(name, value):
    with pytest.raises(ValueError, match=str(value)):
        benchmark_attention(**RUN | {name: value})


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["plain", "compiled"])
def test_gpu_memory_in_use_is_what_the_allocator_says(implementation):
    run = RUN | {"batch_size": 8, "context_length": 1024, "d_head": 64, "device": "cuda"}
    release_memory("cuda")
    before = torch.cuda.memory_allocated()
    row = benchmark_attention(**run, pass_="backward", implementation=implementation)
    assert row["status"] == "ok", row["reason"]
    assert torch.cuda.memory_allocated() == before
    assert row["saved_for_backward_mib"] <= row["memory_before_backward_mib"] * 1.001
    if implementation == "compiled":
        assert row["compile_s"] * 1e3 > 10 * row["p50_ms"]
    else:
        saved = accounting.attention_saved_bytes(8, 1024, 64) / MIB
        assert row["saved_for_backward_mib"] == pytest.approx(saved, rel=0.001)
        assert row["memory_before_backward_mib"] == pytest.approx(saved + 2, rel=0.01)
