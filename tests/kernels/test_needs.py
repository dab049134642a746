"""Where the kernels cannot run is said before it is tried."""

import pytest
import torch

from cs336_systems import kernels
from cs336_systems.kernels import why_no_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_our_kernels_run_on_a_gpu_or_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", True)
    assert (why_no_triton(CPU), why_no_triton(CUDA)) == ("", "")
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", False)  # as beside a GPU
    assert "TRITON_INTERPRET" in why_no_triton(CPU)
    assert why_no_triton(CUDA) == ""
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert "not installed" in why_no_triton(CPU)
