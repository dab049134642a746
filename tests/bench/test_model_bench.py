"""Benchmarks of a model: rows of each cell, and what cannot run becomes a status."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cs336_systems.bench import model_bench
from cs336_systems.bench.model_bench import ModelBenchmark, cold_start_steps, sweep_model
from cs336_systems.configs import ModelConfig, model_size
from cs336_systems.training import steps as model_steps
from labbook import timing
from labbook.timing import Timing

CONFIG = ModelConfig("mini", 2025, d_model=16, d_ff=32, num_layers=2, num_heads=2, vocab_size=64)
RUN = {"batch_size": 2, "context_length": 8, "warmup_steps": 1, "steps": 2}


@pytest.fixture
def bench():
    return ModelBenchmark(CONFIG, 16, "cpu")


def sweep(**changes) -> list[dict]:
    options = {"context_lengths": [8], "batch_size": 2, "passes": ["forward"], "device": "cpu"}
    options |= {"warmup_steps": 1, "steps": 2}
    return [row for rows in sweep_model(CONFIG, **options | changes) for row in rows]


@pytest.mark.parametrize(
    ("dtype", "logits", "precision"),
    [("float32", "float32", "highest"), ("tf32", "float32", "high"), ("bfloat16", "bfloat16", "highest")],
)
def test_a_dtype_is_what_it_says(dtype, logits, precision, monkeypatch, bench):
    seen = []

    def watch(step, *, prepare, **options) -> Timing:
        bench.model.register_forward_hook(lambda module, inputs, logits: seen.append(logits.dtype))
        step()
        seen.append(torch.get_float32_matmul_precision())
        return Timing(step_ms=(1.0,))

    monkeypatch.setattr(timing, "time_steps", watch)
    monkeypatch.setattr(ModelBenchmark, "_why_not", lambda *_: "")
    bench.time("forward_backward", **RUN, dtype=dtype)
    assert seen == [getattr(torch, logits), precision]
    assert all((weight.dtype, weight.grad) == (torch.float32, None) for weight in bench.model.parameters())


def test_out_of_memory_is_a_status_and_the_same_model_goes_on(monkeypatch, bench):
    assert bench.time("forward", **RUN).status == "ok"
    model = bench.model
    with monkeypatch.context() as patch:
        patch.setattr(model_steps, "cross_entropy", lambda *_: torch.empty(2**58))
        assert bench.time("forward_backward", **RUN).status == "oom"
    assert bench.time("train_step", **RUN | {"context_length": 16}).status == "ok"
    assert bench.model is model
    bench.release()
    monkeypatch.setattr(model_bench, "build_model", lambda *_, **__: torch.empty(2**58))
    timing = bench.time("forward", **RUN)
    assert (timing.status, timing.steps) == ("oom", 0)
    assert "building" in timing.reason


def test_a_model_too_large_for_this_memory_is_skipped_before_it_is_built():
    """A million tokens: more than any machine has, and building 10B would take 40 GB by itself."""
    bench = ModelBenchmark(model_size("10B", 2026), 2**20, "cpu")
    timing = bench.time("train_step", **RUN | {"context_length": 2**20})
    assert (timing.status, bench.model) == ("skipped", None)
    assert "GiB" in timing.reason


WRONG = {"passes": ["inference"], "dtypes": ["int8"], "implementations": ["fast"], "device": "gpu"}
WRONG |= {"attention_implementation": "sdpa_flash", "batch_size": 0, "steps": 0}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_a_wrong_argument_is_refused_by_value(name, value):
    with pytest.raises(ValueError, match=str(value).strip("[]'")):
        sweep(**{name: value})


@pytest.mark.parametrize("implementation", ["compiled", "compiled_blocks"])
def test_compiled_is_compiled_and_its_time_is_apart(implementation, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_module(self, backend=backend, **options)
    )
    monkeypatch.setattr(model_bench, "why_no_compile", lambda device: "")
    (row,) = sweep(passes=["train_step"], implementations=[implementation])
    assert (row["status"], row["steps"]) == ("ok", 2)
    assert len(graphs) == 1, "one graph for the model, or one for all of its blocks"
    assert row["compile_s"] > 0


def give_times(monkeypatch, timing) -> None:
    """In place of measuring: timing(pass)."""
    monkeypatch.setattr(ModelBenchmark, "time", lambda self, pass_, **_: timing(pass_))


def test_a_sweep_gives_the_passes_of_one_cell_at_a_time(monkeypatch):
    times = {"forward": 1.0, "forward_backward": 2.0}
    give_times(monkeypatch, lambda pass_: Timing(step_ms=(times[pass_],) * 2, warmup_ms=(9.0,)))
    grid = {"context_lengths": [16, 8], "batch_size": 2, "passes": times, "dtypes": ["float32", "tf32"]}
    cells = list(sweep_model(CONFIG, **grid, device="cpu", warmup_steps=1, steps=2))
    seen = [(rows[0]["dtype"], rows[0]["context_length"], [row["pass"] for row in rows]) for rows in cells]
    assert seen == [(dtype, n, list(times)) for dtype in ("float32", "tf32") for n in (8, 16)]


def test_one_run_answers_for_shorter_warmups(monkeypatch):
    give_times(monkeypatch, lambda _: Timing(warmup_ms=(100.0, 10.0), step_ms=(1.0, 1.0)))
    rows = sweep(warmup_steps=2, warmups=(0, 1, 5))
    assert [(row["warmup_steps"], row["mean_ms"]) for row in rows] == [(0, 55), (1, 5.5), (2, 1)]


def test_a_disturbed_cell_is_measured_again(monkeypatch):
    times = iter([9.0, 5.0, 1.0, 5.0])  # first a forward slower than forward and backward, then a right one
    give_times(monkeypatch, lambda _: Timing(warmup_ms=(9.0,), step_ms=(next(times),)))
    rows = sweep(passes=["forward", "forward_backward"], steps=1)
    assert [row["p50_ms"] for row in rows] == [1.0, 5.0]


def test_cold_steps_are_those_of_a_fresh_process_each(monkeypatch):
    processes = []

    class FreshProcess(ThreadPoolExecutor):
        def __init__(self, count, mp_context):
            processes.append(mp_context.get_start_method())
            super().__init__(count)

    monkeypatch.setattr(model_bench, "ProcessPoolExecutor", FreshProcess)
    run = {"context_length": 8, "batch_size": 1, "passes": ["forward"], "device": "cpu", "steps": 3}
    wrong, right = cold_start_steps(CONFIG, **run)
    assert processes == ["spawn"] * 2
    assert [row["synchronized"] for row in (*wrong, *right)] == [False] * 3 + [True] * 3
    assert [row["step_index"] for row in right] == [0, 1, 2]
    assert "warmup_steps" not in right[0]


@pytest.mark.gpu
def test_gpu_passes_take_longer_and_more_memory_one_than_the_other():
    bench = ModelBenchmark(model_size("small"), 256, "cuda")
    run = {"batch_size": 4, "context_length": 256}
    passes = ("forward", "forward_backward", "train_step")
    forward, both, step = (bench.time(pass_, **run, warmup_steps=3, steps=5) for pass_ in passes)
    assert forward.p50_ms < both.p50_ms < step.p50_ms
    assert forward.peak_memory_mib < both.peak_memory_mib < step.peak_memory_mib
    again = bench.time("forward", **run, warmup_steps=0, steps=1)
    assert again.peak_memory_mib == pytest.approx(forward.peak_memory_mib, rel=0.001), "nothing is left"


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["compiled", "compiled_blocks"])
def test_gpu_compiled_model(implementation):
    bench = ModelBenchmark(model_size("tiny"), 128, "cuda", implementation)
    run = {"batch_size": 2, "context_length": 128, "dtype": "bfloat16", "warmup_steps": 2, "steps": 3}
    found = bench.time("train_step", **run)
    assert found.status == "ok", found.reason
    assert found.compile_s > 0.1
