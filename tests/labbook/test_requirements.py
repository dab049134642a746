"""What a machine lacks is said before it is tried."""

import pytest
import torch

from labbook import requirements
from labbook.requirements import why_no_compile, why_no_memory, why_no_tf32, why_no_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_our_kernels_run_on_a_gpu_or_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", True)
    assert (why_no_triton(CPU), why_no_triton(CUDA)) == ("", "")
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", False)  # as beside a GPU
    assert "TRITON_INTERPRET" in why_no_triton(CPU)
    assert why_no_triton(CUDA) == ""


def test_without_triton_no_kernels_and_nothing_compiled_for_a_gpu(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    monkeypatch.setattr(requirements.shutil, "which", lambda name: name)
    assert "triton" in why_no_triton(CPU)
    assert ("triton" in why_no_compile(CUDA), why_no_compile(CPU)) == (True, "")


@pytest.mark.parametrize(
    ("installed", "runs_on"), [("clang++", {"cpu", "cuda"}), ("gcc", {"cuda"}), ("", set())]
)
def test_compiling_needs_a_compiler(monkeypatch, installed, runs_on):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(requirements, "find_spec", lambda name: name)
    monkeypatch.setattr(requirements.shutil, "which", lambda name: name == installed)
    assert {device.type for device in (CPU, CUDA) if not why_no_compile(device)} == runs_on
    monkeypatch.setenv("CXX", "my-c++")
    assert "my-c++" in why_no_compile(CPU)


def test_only_a_cpu_is_kept_from_running_out_of_memory():
    assert why_no_memory(2**20, CPU) == ""
    assert "1048576.0 GiB" in why_no_memory(2**50, CPU)
    assert why_no_memory(2**50, CUDA) == ""


def test_tf32_needs_a_gpu_of_ampere_or_newer(monkeypatch):
    assert why_no_tf32(CPU)
    for capability, has in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert (why_no_tf32(CUDA) == "") == has
