"""Benchmarks of the fused kernels: rows that can be saved, limits that hold, nothing wrong timed."""

import itertools

import pytest
import torch

from cs336_systems.accounting.step_kernel_costs import MOVED, chip_of, kernel_shape, least_work
from cs336_systems.checks import FUSED
from cs336_systems.configs import LEADERBOARD, ModelConfig
from labbook import load_rows, save_rows
from labbook.timing import Timing

pytest.importorskip("triton")
from cs336_systems.bench import step_kernels
from cs336_systems.bench.step_kernels import sweep_step_kernels

CONFIG = ModelConfig("test", 2026, d_model=8, d_ff=12, num_layers=1, num_heads=2, vocab_size=30)


def test_rows_of_every_pass(monkeypatch):
    """Each step runs, once: forward 1 ms, forward and backward 2 ms, whatever else this machine does."""
    clock = itertools.cycle((1.0, 2.0))
    ran_once = lambda step, **_: step() is not step and Timing((next(clock),))  # noqa: E731
    monkeypatch.setattr(step_kernels, "time_cold_cache", ran_once)
    given = {"kernels": ["rotary", "linear_cross_entropy"], "implementations": ["eager", "triton", "liger"]}
    for rows in sweep_step_kernels(CONFIG, num_tokens=[6], **given):
        save_rows(rows, "leaderboard", "step_kernel_times", machine="test")
    frame = load_rows("leaderboard", "test", "step_kernel_times")
    assert len(frame) == 2 * 3 * 2
    if not torch.cuda.is_available():
        assert set(frame.loc[frame["status"] == "skipped", "implementation"]) == {"liger"}
    assert set(frame["status"]) <= {"ok", "skipped"}
    assert set(frame["p50_ms"].dropna()) == {1.0, 2.0}


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(step_kernels, "fused_kernel", lambda name: lambda a, b: a * b)
    ((row, _),) = sweep_step_kernels(CONFIG, num_tokens=[6], kernels=["swiglu"], implementations=["triton"])
    assert (row["status"], row["p50_ms"]) == ("error", None)
    assert "output of swiglu" in row["reason"]


def test_least_work_counts_the_tensors():
    """Inputs and outputs of the plain functions, and what their gradients read and write."""
    for kernel in MOVED:
        shape = kernel_shape(kernel, CONFIG, 6)
        x = FUSED[kernel].make(shape, torch.Generator())
        large = sum(each.numel() == x[0].numel() for each in x if each.shape == x[0].shape)
        forward, both = (
            least_work(kernel, shape, 2, backward=b).moved_bytes / x[0].nbytes * 2 for b in (0, 1)
        )
        assert forward == large + 1
        read = large if kernel != "rotary" else 0  # backward reads the incoming gradient, and inputs again
        assert both == forward + 1 + read + large
    loss = kernel_shape("linear_cross_entropy", LEADERBOARD, 32_768)
    assert least_work("linear_cross_entropy", loss, 2, backward=True).flops == 6 * 32_768 * 4096 * 151_936


def test_the_limit_of_a_chip():
    assert chip_of("NVIDIA H200").name == "H200 SXM"
    assert chip_of("NVIDIA H100 PCIe") is None
    assert chip_of("") is None
    work = least_work("rms_norm", (32_768, 4096), 2, backward=False)
    assert work.seconds(chip_of("NVIDIA H200")) == pytest.approx(2 * 32_768 * 4096 * 2 / 4.8e12)


@pytest.mark.parametrize("wrong", [{"kernels": ["softmax"]}, {"implementations": ["numpy"]}], ids=str)
def test_unknown_names(wrong):
    ((value,),) = wrong.values()
    with pytest.raises(ValueError, match=value):
        next(sweep_step_kernels(CONFIG, num_tokens=[6], **wrong))
