"""Benchmarks of a model: each pass does what it says, and what cannot run becomes a status."""

import math
from dataclasses import replace

import pytest
import torch

from cs336_systems.bench import model_bench as training
from cs336_systems.bench.model_bench import ModelBenchmark, benchmark_model, model_key, sweep_model
from cs336_systems.configs import ModelConfig, model_size
from cs336_systems.measure import compiling, host
from cs336_systems.measure import model_steps as steps
from cs336_systems.measure.compiling import time_compiled
from cs336_systems.measure.rows import load_rows, save_rows
from cs336_systems.measure.timing import Timing

CONFIG = ModelConfig("mini", 2025, d_model=16, d_ff=32, num_layers=2, num_heads=2, vocab_size=64)
RUN = {"batch_size": 2, "context_length": 8, "warmup_steps": 1, "steps": 2}


@pytest.fixture
def model_benchmark():
    return ModelBenchmark(CONFIG, 16, device="cpu")


class Watch:
    """Stands in for `time_steps`: runs one step and looks at the model around it."""

    def __init__(self, monkeypatch, model_benchmark):
        self.benchmark, self.logits_dtype, self.saves_for_backward = model_benchmark, None, None
        monkeypatch.setattr(training, "time_steps", self)

    def __call__(self, step, *, prepare, **options) -> Timing:
        model = self.benchmark._model

        def look(module, inputs, logits):
            self.logits_dtype, self.saves_for_backward = logits.dtype, logits.requires_grad

        hook = model.register_forward_hook(look)
        self.precision = torch.get_float32_matmul_precision()
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        arguments = () if prepare is None else (prepare(),)
        self.gradients_after_prepare = self.gradients(model)
        step(*arguments)
        hook.remove()
        self.gradients_after_step = self.gradients(model)
        self.weights_changed = any(not torch.equal(before[name], w) for name, w in model.named_parameters())
        return Timing(step_ms=(1.0,))

    @staticmethod
    def gradients(model) -> bool:
        return all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(
    ("pass_", "saves", "gradients", "weights_changed"),
    [
        ("forward", False, False, False),
        ("backward", True, True, False),
        ("forward_backward", True, True, False),
        ("train_step", True, True, True),
    ],
)
def test_a_pass_does_what_it_says(pass_, saves, gradients, weights_changed, monkeypatch, model_benchmark):
    watch = Watch(monkeypatch, model_benchmark)
    model_benchmark.time(pass_, **RUN)
    assert not watch.gradients_after_prepare
    assert watch.saves_for_backward is saves
    assert watch.gradients_after_step is gradients
    assert watch.weights_changed is weights_changed
    assert all(weight.grad is None for weight in model_benchmark._model.parameters())


@pytest.mark.parametrize(
    ("dtype", "logits", "precision"),
    [
        ("float32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
        ("bfloat16", torch.bfloat16, "highest"),
        ("float16", torch.float16, "highest"),
    ],
)
def test_a_dtype_is_what_it_says(dtype, logits, precision, monkeypatch, model_benchmark):
    monkeypatch.setattr(training, "why_no_tf32", lambda device: "")
    watch = Watch(monkeypatch, model_benchmark)
    model_benchmark.time("forward", **RUN, dtype=dtype)
    assert (watch.logits_dtype, watch.precision) == (logits, precision)
    assert next(model_benchmark._model.parameters()).dtype == torch.float32


def test_times_are_measured(model_benchmark):
    timing = model_benchmark.time("train_step", **RUN)
    assert (timing.status, timing.steps, len(timing.warmup_ms), timing.compile_s) == ("ok", 2, 1, None)
    assert timing.peak_memory_mib is None


def test_one_model_serves_every_pass_and_context(model_benchmark):
    model_benchmark.time("forward", **RUN)
    model = model_benchmark._model
    assert model_benchmark.time("train_step", **RUN | {"context_length": 16}).status == "ok"
    assert model_benchmark._model is model
    with pytest.raises(ValueError, match="17"):
        model_benchmark.time("forward", **RUN | {"context_length": 17})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"pass_": "inference"},
            "pass 'inference' is unknown; allowed: forward, backward, forward_backward, train_step",
        ),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; allowed: float32, tf32, bfloat16, float16"),
        (
            {"implementation": "fast"},
            "implementation 'fast' is unknown; allowed: eager, compiled, compiled_blocks",
        ),
        (
            {"attention_implementation": "slow"},
            "attention implementation 'slow' is unknown; allowed: auto, reference",
        ),
        ({"device": "gpu"}, "device 'gpu' is unknown; allowed: auto, cpu, cuda"),
        ({"batch_size": 0}, "batch_size"),
        ({"steps": 0}, "steps=0; allowed"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        benchmark_model(CONFIG, **{"pass_": "forward", "device": "cpu"} | RUN | arguments)


def test_out_of_memory_while_building_is_a_status(monkeypatch, model_benchmark):
    def build(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training, "build_model", build)
    timing = model_benchmark.time("forward", **RUN)
    assert (timing.status, timing.steps) == ("oom", 0)
    assert timing.reason.startswith("building the model: OutOfMemoryError")


def test_after_out_of_memory_the_same_model_goes_on(monkeypatch, model_benchmark):
    model_benchmark.time("forward", **RUN)
    model = model_benchmark._model
    with monkeypatch.context() as patch:
        patch.setattr(steps, "cross_entropy", lambda *_: torch.empty(2**58))
        assert model_benchmark.time("forward_backward", **RUN).status == "oom"
    assert model_benchmark.time("forward_backward", **RUN).status == "ok"
    assert model_benchmark._model is model


def test_a_model_too_large_for_this_memory_is_skipped_before_it_is_built(monkeypatch):
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2**30)
    timing = benchmark_model(model_size("10B", 2026), **RUN, pass_="train_step", device="cpu")
    assert timing.status == "skipped"
    assert timing.reason.endswith("GiB, and 1.0 GiB are free")


def test_tf32_is_skipped_on_a_cpu(model_benchmark):
    timing = model_benchmark.time("forward", **RUN, dtype="tf32")
    assert (timing.status, timing.reason[:4]) == ("skipped", "TF32")


def test_without_a_compiler_compiled_is_skipped(monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    timing = benchmark_model(CONFIG, **RUN, pass_="forward", implementation="compiled", device="cpu")
    assert timing.status == "skipped"
    assert "needs a C++ compiler" in timing.reason


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
    monkeypatch.setattr(training, "why_no_compile", lambda device: "")
    timing = benchmark_model(CONFIG, **RUN, pass_="train_step", implementation=implementation, device="cpu")
    assert (timing.status, timing.steps) == ("ok", 2)
    assert len(graphs) == 1, "one graph for the model, or one for all of its blocks"
    assert timing.compile_s > 0


def test_code_that_cannot_be_compiled_is_an_error_with_its_reason():
    def broken(graph, inputs):
        raise NotImplementedError("no such backend")

    step = torch.compile(lambda: torch.ones(2) + 1, backend=broken)
    timing = time_compiled(step, device="cpu", warmup_steps=1, steps=1)
    assert timing.status == "error"
    assert "no such backend" in timing.reason


def test_a_sweep_gives_rows_that_can_be_saved_cell_by_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    options = {"batch_size": 2, "device": "cpu", "warmup_steps": 1, "steps": 2}
    passes = ("forward", "forward_backward", "train_step")
    # A model as small as this takes a millisecond: on a busy machine its forward may seem to take longest.
    times = dict(zip(passes, (1.0, 2.0, 3.0), strict=True))
    measured = ModelBenchmark.time

    def in_order(self, pass_, **options):
        timing = measured(self, pass_, **options)
        return replace(timing, step_ms=(times[pass_],) * 2) if timing.status == "ok" else timing

    monkeypatch.setattr(ModelBenchmark, "time", in_order)
    cells = sweep_model(CONFIG, context_lengths=[16, 8], passes=passes, dtypes=["float32", "tf32"], **options)
    for cell in cells:
        assert [key["pass"] for key, _ in cell] == list(passes)
        save_rows([key | timing.as_row() for key, timing in cell], "benchmarking_script", machine="testbox")
    rows = load_rows("benchmarking_script", "testbox")
    assert len(rows) == 12
    assert set(rows.context_length) == {8, 16}
    assert set(rows[rows.dtype == "tf32"].status) == {"skipped"}
    assert set(rows.model_size) == {"mini"}


def test_a_disturbed_cell_is_measured_again(monkeypatch):
    times = iter([9.0, 5.0, 1.0, 5.0])  # first a forward slower than forward and backward, then a right one
    monkeypatch.setattr(ModelBenchmark, "time", lambda self, *_, **__: Timing(step_ms=(next(times),)))
    passes = ("forward", "forward_backward")
    (cell,) = sweep_model(CONFIG, context_lengths=[8], batch_size=1, passes=passes, device="cpu")
    assert [timing.p50_ms for _, timing in cell] == [1.0, 5.0]


def test_the_key_names_everything_a_run_depends_on():
    key = model_key(CONFIG, 8, 2, "forward", "float32", "compiled", 5)
    assert key == {
        "implementation": "compiled",
        "attention": "reference",
        "edition": 2025,
        "model_size": "mini",
        "d_model": 16,
        "num_heads": 2,
        "batch_size": 2,
        "context_length": 8,
        "dtype": "float32",
        "pass": "forward",
        "warmup_steps": 5,
    }


@pytest.mark.gpu
def test_gpu_passes_take_longer_and_more_memory_one_than_the_other():
    benchmark = ModelBenchmark(model_size("small"), 256, device="cuda")
    runs = [
        benchmark.time(pass_, batch_size=4, warmup_steps=3, steps=5)
        for pass_ in ("forward", "forward_backward", "train_step")
    ]
    assert [run.status for run in runs] == ["ok"] * 3
    assert runs[0].p50_ms < runs[1].p50_ms < runs[2].p50_ms
    assert runs[0].peak_memory_mib < runs[1].peak_memory_mib < runs[2].peak_memory_mib
    again = benchmark.time("forward", batch_size=4, warmup_steps=0, steps=1)
    assert math.isclose(again.peak_memory_mib, runs[0].peak_memory_mib, rel_tol=0.001), (
        "nothing was left behind"
    )


@pytest.mark.gpu
def test_gpu_out_of_memory_is_a_status_and_the_model_goes_on():
    benchmark = ModelBenchmark(model_size("small"), 16_384, device="cuda")
    huge = benchmark.time("forward_backward", batch_size=64, warmup_steps=0, steps=1)
    assert huge.status == "oom"
    assert (
        benchmark.time("train_step", batch_size=1, context_length=128, warmup_steps=1, steps=1).status == "ok"
    )
    benchmark.release()
    assert torch.cuda.memory_allocated() < 2**28


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["compiled", "compiled_blocks"])
def test_gpu_compiled_model(implementation):
    benchmark = ModelBenchmark(model_size("tiny"), 128, device="cuda", implementation=implementation)
    timing = benchmark.time("train_step", batch_size=2, dtype="bfloat16", warmup_steps=2, steps=3)
    assert timing.status == "ok", timing.reason
    assert timing.compile_s > 0.1
