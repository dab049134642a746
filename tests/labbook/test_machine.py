"""The machine: its card, which says nothing about whose it is; what it lacks; its clocks."""

import contextlib
import dataclasses
import getpass
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labbook import machine as module
from labbook.machine import MachineCard, load_card, machine_card, watched_clocks, why_no_compile

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SAID = "1980, 120.5, 0\n1700, 650.0, 100\n1600, 690.0, 100\n1650, [N/A], 100\n1500, 700.0, 100\n14"
H200 = MachineCard(
    slug="h200", gpu="NVIDIA H200", gpu_memory_gib=139.8, sm_count=132, cpu="Intel Xeon", cores=16,
    memory_gib=128.0, python="3.12.3", torch="2.11.0+cu130", triton="3.6.0", matmul_tflops={"float32": 51.0},
    copy_gbps=4300.0, measured_at="2026-01-01T00:00:00Z",
)  # fmt: skip


def keep(figures, card):
    (figures / card.slug).mkdir(exist_ok=True)
    (figures / card.slug / "machine.json").write_text(json.dumps(dataclasses.asdict(card)))


def test_a_card_is_measured_once_and_for_another_gpu_or_version_anew(measured_cards, figures):
    first = machine_card("cpu")
    assert machine_card("cpu") == first == load_card(first.slug)
    assert len(measured_cards) == 1
    for change in [{"gpu": "NVIDIA A100"}, {"torch": "1.0.0"}, {"triton": "0.1"}]:
        keep(figures, dataclasses.replace(first, **change))
        card = machine_card("cpu")
        assert card == dataclasses.replace(first, measured_at=card.measured_at)
    assert len(measured_cards) == 4


def test_the_card_describes_this_machine_and_nobody(measured_cards, figures):
    card = machine_card("cpu")
    assert (card.gpu, card.torch) == ("none", torch.__version__)
    text = (figures / card.slug / "machine.json").read_text()
    secrets = (socket.gethostname(), str(Path.home()), str(Path.cwd()), f'"{getpass.getuser()}"')
    assert [secret for secret in secrets if secret in text] == []


@pytest.mark.parametrize(
    ("gpu", "cpu", "gpus", "slug"),
    [
        ("NVIDIA H200", "", 1, "my-h200"),
        ("NVIDIA H200", "", 2, "my-h200-x2"),
        ("NVIDIA H200", "", 8, "h200-x8"),
        ("NVIDIA A100-SXM4-80GB", "", 1, "a100"),
        ("none", "Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", 1, "cpu-intel-core-i7-8650u-8-cores"),
        ("none", "AMD EPYC 9654 96-Core Processor", 1, "cpu-amd-epyc-9654-8-cores"),
    ],
)
def test_slugs(gpu, cpu, gpus, slug, monkeypatch):
    """Committed are those of one card and of two."""
    assert module.machine_slug(gpu, cpu, 8, gpus) == slug
    monkeypatch.setenv("LABBOOK_REMEASURE", "h200")  # the reference, where that is asked for
    assert module.machine_slug(gpu, cpu, 8, gpus) == slug.removeprefix("my-")


def test_a_card_that_is_not_there_or_damaged_is_a_clear_error(figures):
    keep(figures, H200)
    with pytest.raises(FileNotFoundError, match="h200"):
        load_card("nobody")
    no_rates = json.dumps(dataclasses.asdict(H200) | {"matmul_tflops": None})
    for damage in ("{", '{"slug": "h200"}', no_rates):
        (figures / "h200" / "machine.json").write_text(damage)
        with pytest.raises(ValueError, match="h200/machine"):
            load_card("h200")


@pytest.mark.gpu
def test_a_gpus_card_is_measured(figures):
    card = machine_card("cuda")
    assert card.gpu == torch.cuda.get_device_name()
    assert card.matmul_tflops["bfloat16"] > 2 * card.matmul_tflops["float32"]
    assert 100 < card.copy_gbps < 20_000


def test_compiling_needs_a_compiler_and_for_a_gpu_triton(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    for installed, runs_on in (("clang++", {"cpu", "cuda"}), ("gcc", {"cuda"}), ("", set())):
        monkeypatch.setattr(module.shutil, "which", lambda name, there=installed: name == there)
        assert {device.type for device in (CPU, CUDA) if not why_no_compile(device)} == runs_on
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "triton" in why_no_compile(CUDA)


def test_a_cpu_is_kept_from_running_out_of_memory_and_tf32_needs_a_gpu_of_ampere_or_newer(
    monkeypatch,
):
    assert module.why_no_memory(2**20, CPU) == module.why_no_memory(2**50, CUDA) == ""
    assert "1048576.0 GiB" in module.why_no_memory(2**50, CPU)
    assert module.why_no_tf32(CPU)
    for capability, has in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, answer=capability: answer
        )
        assert (module.why_no_tf32(CUDA) == "") == has


@pytest.fixture
def tool(monkeypatch):
    """A nvidia-smi that has said SAID when it is stopped."""
    watch = SimpleNamespace(stopped=False, communicate=lambda: (SAID, None))
    watch.terminate = lambda: setattr(watch, "stopped", True)
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    monkeypatch.setattr(module.subprocess, "Popen", lambda *arguments, **options: watch)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2")
    )
    return watch


def test_clocks_are_the_medians_of_the_busy_samples(tool):
    with watched_clocks(CPU) as watched:
        pass
    assert (watched, tool.stopped) == ({}, False), "without a GPU nothing is asked"
    with contextlib.suppress(KeyError), watched_clocks(CUDA) as watched:
        assert not tool.stopped
        raise KeyError  # the measurement failed
    assert (watched, tool.stopped) == ({"sm_clock_mhz": 1600, "power_w": 690}, True)
