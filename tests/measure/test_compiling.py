"""What cannot run on a device is said before it is tried."""

import pytest
import torch

from cs336_systems.attention.plain import reference_attention
from cs336_systems.bench.attention_bench import benchmark_attention
from cs336_systems.bench.flash_bench import benchmark_cell
from cs336_systems.bench.model_bench import benchmark_model
from cs336_systems.configs import model_size
from cs336_systems.measure.compiling import why_no_triton

pytest.importorskip("triton")
from cs336_systems.bench.weighted_sum_bench import sweep_weighted_sum

SIZE = {"context_length": 16, "d_head": 16}
ON_THE_CPU = {"device": "cpu", "batch_size": 1}


@pytest.fixture
def _no_interpreter(monkeypatch):
    """As on a machine with a GPU."""
    monkeypatch.setattr("cs336_systems.attention.launcher.INTERPRETED", False)


@pytest.mark.usefixtures("_no_interpreter")
def test_beside_a_gpu_our_kernels_are_not_tried_on_the_cpu():
    assert why_no_triton(torch.device("cuda")) == ""
    tiny = model_size("tiny")
    timings = [
        benchmark_attention(implementation="flash_triton", **SIZE, **ON_THE_CPU),
        benchmark_attention(implementation="flash_compiled", **SIZE, **ON_THE_CPU),
        *benchmark_cell("flash_triton", reference_attention, passes=["forward"], **SIZE, **ON_THE_CPU),
        *next(sweep_weighted_sum(num_rows=[8], d_model=8, implementations=["triton"], device="cpu")),
        benchmark_model(
            tiny, context_length=16, pass_="forward", attention_implementation="flash_triton", **ON_THE_CPU
        ),
    ]
    rows = [timing if isinstance(timing, dict) else timing.as_row() for timing in timings]
    assert [row["status"] for row in rows] == ["skipped"] * len(rows)
    assert {row["reason"] for row in rows} == {why_no_triton(torch.device("cpu"))}
