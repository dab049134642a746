"""Times with a cold cache: gradients are cleared before each repetition, slow steps repeated a few times."""

import pytest
import torch

from cs336_systems.measure.cold_cache import CPU_STEPS, SLOW_STEPS, time_cold_cache


def test_gradients_are_cleared_before_each_step_on_a_cpu():
    x, seen = torch.ones(3, requires_grad=True), []

    def step():
        seen.append(x.grad)
        x.sum().backward()

    timing = time_cold_cache(step, device=torch.device("cpu"), to_clear=iter([x]))
    assert timing.steps == CPU_STEPS
    assert seen == [None] * (CPU_STEPS + 1)


def test_running_out_of_memory_is_a_status():
    def step():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert time_cold_cache(step, device=torch.device("cpu")).status == "oom"


@pytest.mark.gpu
def test_a_gpu_reads_its_inputs_from_memory_and_the_flush_is_not_counted():
    device = torch.device("cuda")
    x = torch.randn(4 * 2**20, device=device, requires_grad=True)  # 16 MiB: less than an L2 cache
    step = lambda: x.sum().backward()  # noqa: E731
    held_mib = torch.cuda.memory_allocated() / 2**20
    timing = time_cold_cache(step, device=device, to_clear=[x])
    assert timing.steps > SLOW_STEPS
    assert 15 < timing.peak_memory_mib - held_mib < 100  # the gradient, not the 256 MiB that flush the cache
    warm = time_cold_cache(lambda: None, device=device)
    assert warm.p50_ms < timing.p50_ms


@pytest.mark.gpu
def test_a_slow_step_is_repeated_a_few_times():
    a = torch.randn(16_384, 16_384, device="cuda")
    assert time_cold_cache(lambda: a @ a, device=a.device).steps == SLOW_STEPS
