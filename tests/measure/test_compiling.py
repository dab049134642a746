"""The time of compiling is kept apart from that of what was compiled."""

import time

import torch

from cs336_systems.measure.compiling import time_compiled

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


def test_running_out_of_memory_is_the_first_steps_status():
    def step():
        raise torch.OutOfMemoryError("CUDA out of memory")

    timing = time_compiled(step, **RUN)
    assert (timing.status, timing.compile_s) == ("oom", None)
