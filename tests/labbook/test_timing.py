"""Timing: what is measured is the step, out of memory is a result, and its memory comes back."""

import contextlib
import gc
import itertools
import time
import weakref

import pytest
import torch

from labbook.timing import (
    CPU_STEPS,
    SLOW_STEPS,
    Timing,
    matmul_precision,
    resolve_device,
    time_cold_cache,
    time_compiled,
    time_steps,
)


def test_steps_get_what_was_prepared_for_them_and_the_warm_up_is_kept_apart():
    prepared = iter(range(10))
    seen = []
    timing = time_steps(
        seen.append, prepare=lambda: next(prepared), device="cpu", warmup_steps=2, steps=3
    )
    assert (seen, timing.steps, timing.status) == ([0, 1, 2, 3, 4], 3, "ok")


def test_the_summary_of_known_steps():
    row = Timing(step_ms=(1.0, 2.0, 3.0, 4.0, 10.0)).as_row()
    found = [row[name] for name in ("mean_ms", "std_ms", "p20_ms", "p50_ms", "p80_ms", "steps")]
    assert found == pytest.approx([4, 12.5**0.5, 1.8, 3, 5.2, 5])


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("works", "prepares"), [(0, False), (3, False), (3, True)])
def test_out_of_memory_is_a_status_and_the_memory_comes_back(error, works, prepares):
    """Frames of the error and of its cause hold tensors, as those of a real step do."""
    held = []
    steps = itertools.count()

    def allocate():
        held.append(weakref.ref(tensor := torch.ones(1000)))
        return tensor

    def fail():
        deeper = allocate()
        raise KeyError(deeper.shape)

    def step(prepared=None):
        activation = allocate()
        if next(steps) < works:
            return activation
        try:
            fail()
        except KeyError as cause:
            raise error from cause

    gc.disable()
    try:
        prepare = allocate if prepares else None
        timing = time_steps(step, prepare=prepare, device="cpu", warmup_steps=2, steps=3)
    finally:
        gc.enable()
    assert (timing.status, timing.step_ms) == ("oom", ())
    assert timing.reason.startswith(type(error).__name__)
    assert len(held) >= 2
    assert all(tensor() is None for tensor in held)
    assert "mean_ms" not in timing.as_row()


def test_tf32_is_allowed_inside_only_whichever_of_pytorchs_switches_was_used():
    """The older one refuses to answer where the newer one was used, which is left as it was."""
    for dtype, inside in (("tf32", "high"), ("float16", "highest")):
        with matmul_precision("tf32"):
            with contextlib.suppress(KeyError), matmul_precision(dtype):
                assert torch.get_float32_matmul_precision() == inside
                raise KeyError
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "highest"
    switch = torch.backends.cuda.matmul
    with matmul_precision("float32"):
        switch.fp32_precision = "tf32"
        with matmul_precision("float32"):
            assert switch.fp32_precision == "ieee"
        assert switch.fp32_precision == "tf32"
    assert torch.get_float32_matmul_precision() == "highest"


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device() == torch.device("cpu")
    with pytest.raises(RuntimeError, match="cuda"):
        resolve_device("cuda")


RUN = {"device": "cpu", "warmup_steps": 1, "steps": 3}


def slow_to_compile(graph, inputs):
    time.sleep(0.3)
    return graph.forward


def test_compiling_is_no_part_of_the_steps_and_is_done_again_each_time():
    x = torch.ones(4)
    step = torch.compile(lambda: x * 2 + 1, backend=slow_to_compile)
    for _ in range(2):
        timing = time_compiled(step, **RUN)
        assert (timing.status, timing.steps) == ("ok", 3)
        assert timing.compile_s > 0.3
        assert timing.p50_ms < 300


def test_what_cannot_be_compiled_is_an_error_in_a_row():
    def step():
        torch._dynamo.graph_break()

    timing = time_compiled(torch.compile(step, backend="eager", fullgraph=True), **RUN)
    assert (timing.status, timing.step_ms) == ("error", ())
    assert timing.reason


def test_gradients_are_cleared_before_each_step_on_a_cpu():
    x = torch.ones(3, requires_grad=True)
    seen = []

    def step():
        seen.append(x.grad)
        x.sum().backward()

    assert time_cold_cache(step, device=torch.device("cpu"), to_clear=iter([x])).steps == CPU_STEPS
    assert seen == [None] * (CPU_STEPS + 1)


@pytest.mark.gpu
def test_a_gpu_reads_its_inputs_from_memory_and_the_flush_is_not_counted():
    device = torch.device("cuda")
    x = torch.randn(4 * 2**20, device=device, requires_grad=True)  # 16 MiB: less than an L2 cache
    held_mib = torch.cuda.memory_allocated() / 2**20
    timing = time_cold_cache(lambda: x.sum().backward(), device=device, to_clear=[x])
    assert timing.steps > SLOW_STEPS
    assert (
        15 < timing.peak_memory_mib - held_mib < 100
    )  # the gradient, not the 256 MiB that flush the cache
    assert time_cold_cache(lambda: None, device=device).p50_ms < timing.p50_ms
    a = torch.randn(16_384, 16_384, device=device)
    assert time_cold_cache(lambda: a @ a, device=device).steps == SLOW_STEPS, "a slow step"


@pytest.mark.gpu
def test_gpu_times_are_of_the_work_and_without_synchronising_of_the_launch():
    a = torch.randn(8192, 8192, device="cuda")
    step = lambda: torch.mm(a, a)  # noqa: E731
    step()
    held_mib = torch.cuda.memory_allocated() / 2**20  # a, and the workspace of cuBLAS
    right = time_steps(step, device="cuda", warmup_steps=2, steps=5)
    wrong = time_steps(step, device="cuda", warmup_steps=2, steps=5, synchronize=False)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - start) * 1e3
    assert right.p50_ms == pytest.approx(wall_ms, rel=0.3)
    assert wrong.p50_ms < right.p50_ms / 10
    assert right.peak_memory_mib == pytest.approx(held_mib + 256, abs=1)
