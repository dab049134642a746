"""The machine: its card (what it is and was measured to do), what it lacks for a run, its clocks meanwhile.

`why_not` and each `why_no_...` give a reason, or "" where nothing is missing.
"""

import importlib.metadata
import io
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import psutil
import torch

from labbook.files import figures_dir, find, read_record, write_record
from labbook.project import project
from labbook.timing import matmul_precision, release_memory, resolve_device, time_steps

GIB = 2**30
_CLOCKS = "--query-gpu=clocks.sm,power.draw,utilization.gpu"


def now() -> str:
    """The time, as cards and runs have it: "2026-11-25T21:00:00Z"."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


@dataclass(frozen=True)
class MachineCard:
    """A machine and its measured limits. Nothing in it names a host, a user or a path."""

    slug: str
    gpu: str
    gpu_memory_gib: float | None
    sm_count: int | None
    cpu: str
    cores: int
    memory_gib: float
    python: str
    torch: str
    triton: str
    matmul_tflops: dict[str, float]
    copy_gbps: float
    measured_at: str = field(default_factory=now)

    def __post_init__(self):
        self.line()  # which fails where a file was damaged

    def line(self) -> str:
        """The card on one line."""
        memory = self.gpu_memory_gib
        gpu = f"{self.gpu} ({memory:.0f} GiB, {self.sm_count} SMs)" if memory else "no GPU"
        rates = ", ".join(f"{dtype} {rate:.3g}" for dtype, rate in self.matmul_tflops.items())
        return (
            f"{self.slug}: {gpu}, {self.cpu} ({self.cores} cores, {self.memory_gib:.0f} GiB), torch "
            f"{self.torch}, triton {self.triton}; measured: matmul {rates} TFLOP/s, copy "
            f"{float(f'{self.copy_gbps:.3g}'):,g} GB/s"
        )


def machine_card(
    device: str | torch.device = "auto", several: bool = False, anew: bool = False
) -> MachineCard:
    """The card of this machine: from `figures/<slug>/machine.json`, or measured (seconds) and written there.

    several: for rows of several processes, which depend on how many GPUs there are.
    anew: measure it again.
    A card that tells of another GPU, torch or triton is measured anew.
    Raises RuntimeError: the device is not there. PermissionError: the figures folder cannot be written to.
    ValueError: the stored card is damaged.
    """
    device = resolve_device(device)
    facts = _describe(device, several)
    if not anew and facts["slug"] in machines():
        card = load_card(facts["slug"])
        if all(getattr(card, name) == facts[name] for name in ("gpu", "torch", "triton")):
            return card
    card = MachineCard(**facts, matmul_tflops=_matmul_tflops(device), copy_gbps=_copy_gbps(device))
    release_memory(device)
    write_record(figures_dir() / card.slug / "machine.json", card)
    return card


def machines() -> list[str]:
    """The machines that have a card, and so may have rows; parameters.yaml asks."""
    names = {card.parent.name for card in figures_dir().glob("*/machine.json")}
    names |= {name for name in project().committed if find(name, "machine.json").exists()}
    return sorted(names)


def load_card(slug: str) -> MachineCard:
    """The stored card of a machine.

    Raises FileNotFoundError: there is none; allowed are those listed. ValueError: the file is damaged.
    """
    if slug not in machines():
        raise FileNotFoundError(f"no machine card for {slug!r}; allowed: {', '.join(machines())}")
    return read_record(find(slug, "machine.json"), MachineCard)


def gpu_of(slug: str) -> str:
    """The GPU of a machine, as its card has it; without one, that of this machine."""
    if slug in machines():
        return load_card(slug).gpu
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def versions() -> dict[str, str]:
    """By name; triton is not imported for it: that settles for good whether kernels are interpreted."""
    names = {"python": platform.python_version(), "torch": torch.__version__, "triton": "none"}
    with suppress(importlib.metadata.PackageNotFoundError):
        names["triton"] = importlib.metadata.version("triton")
    return names


def machine_slug(gpu: str, cpu: str, cores: int, gpus: int = 1) -> str:
    """Name of a machine's folder: `a100` for "NVIDIA A100", `cpu-intel-xeon-2-cores` for two Xeon cores.

    Committed machines keep their names: your own H200 is `my-h200`, unless $LABBOOK_REMEASURE says "h200".
    gpus: how many of this kind a run sees: `a100-x2`, or `a100` for one.
    """
    if gpu == "none":
        return f"cpu-{_slug(f'{cpu} {cores} cores')}"
    card = _slug(gpu)
    slug = f"{card}-x{gpus}" if gpus > 1 else card
    is_remeasured = os.environ.get("LABBOOK_REMEASURE") == card
    is_anothers = slug in project().committed and not is_remeasured
    return f"my-{slug}" if is_anothers else slug


def _slug(model):
    """Lower-case words and numbers of a model's name, joined by hyphens."""
    # One card is sold with several memories and sockets.
    more = r"\((r|tm|c)\)|@.*?ghz|\d+-core|\b(nvidia|geforce|cpu|processor|\d+gb|hbm\d\w?|sxm\d|pcie)\b"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(more, " ", model.lower())).strip("-")


def _describe(device, several):
    """The part of a card that is looked up; the processor's model is without a word about the host."""
    facts = {
        "gpu": "none",
        "gpu_memory_gib": None,
        "sm_count": None,
        "cpu": _cpu_model(),
        "cores": core_count(),
        "memory_gib": round(memory_bytes() / GIB, 1),
    }
    gpus = torch.cuda.device_count() if several else 1
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / GIB, 1)
        facts["sm_count"] = properties.multi_processor_count
    facts["slug"] = machine_slug(facts["gpu"], facts["cpu"], facts["cores"], gpus)
    return facts | versions()


def _cpu_model():
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def core_count() -> int:
    """The cores that this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _matmul_tflops(device):
    """Rate of a large square matmul for each dtype that the device is made for, on random numbers."""
    rates = {}
    for dtype in ("float32", "tf32", "bfloat16", "float16"):
        if dtype == "tf32" and why_no_tf32(device):
            continue
        if device.type == "cuda":
            rates[dtype] = _matmul_rate(dtype, 8192, device, steps=10)
        # A CPU without instructions for a 16-bit type multiplies it tens or hundreds of times slower.
        elif not rates or _matmul_rate(dtype, 256, device, steps=3) > rates["float32"] / 10:
            rates[dtype] = _matmul_rate(dtype, 1024, device, steps=5)
    return rates


def _matmul_rate(dtype, size, device, steps):
    """TFLOP/s of one (size, size) by (size, size) matmul: 2 size^3 operations in the median time."""
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    a = torch.randn(size, size, device=device, dtype=kind)
    b = torch.randn_like(a)
    out = torch.empty_like(a)
    with matmul_precision(dtype):
        timing = time_steps(
            lambda: torch.mm(a, b, out=out), device=device, warmup_steps=3, steps=steps
        )
    return float(f"{2 * size**3 / timing.p50_ms / 1e9:.4g}")


def _copy_gbps(device):
    """GB/s of a copy too large for any cache, the bytes read and the bytes written counted."""
    if device.type == "cuda":
        size = min(4 * GIB, torch.cuda.mem_get_info()[0] // 4)
    else:
        size = min(GIB // 2, memory_bytes() // 16)
    source = torch.ones(size // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    timing = time_steps(lambda: target.copy_(source), device=device, warmup_steps=1, steps=3)
    return float(f"{2 * source.nbytes / timing.p50_ms / 1e6:.4g}")


def memory_bytes() -> int:
    """The machine's memory, or a container's share of it."""
    whole = psutil.virtual_memory().total
    # Of a control group, version 2; "max" where there is no limit.
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    return min(whole, int(text)) if text.isdigit() else whole


def why_not(
    device: torch.device, dtype: str, needs: Collection[str] = (), needed_bytes: int = 0
) -> str:
    """The first thing that the device lacks for a run.

    dtype: of its rows, "tf32" among them. needs: "compiler" where torch.compile makes its code; other words
    are not this machine's. needed_bytes: of memory, at least.
    """
    no_tf32 = why_no_tf32(device) if dtype == "tf32" else ""
    no_compiler = why_no_compile(device) if "compiler" in needs else ""
    return no_tf32 or no_compiler or why_no_memory(needed_bytes, device)


def why_no_tf32(device: torch.device) -> str:
    """Why the device has no TF32 matmuls."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return ""
    return "TF32 matmuls need a CUDA GPU of the Ampere generation or newer"


def why_no_memory(needed_bytes: int, device: torch.device) -> str:
    """Why a run of this size must not be tried on a CPU, where it would end the process.

    A GPU reports that it is out of memory and goes on, so there everything is tried.
    """
    available = min(psutil.virtual_memory().available, memory_bytes())
    if device.type == "cuda" or needed_bytes <= available:
        return ""
    return f"needs about {needed_bytes / GIB:.1f} GiB, and {available / GIB:.1f} GiB are free"


def why_no_compile(device: torch.device) -> str:
    """Why torch.compile cannot make code for the device."""
    on_gpu = device.type == "cuda"
    if on_gpu and not find_spec("triton"):
        return "torch.compile needs triton to make code for a GPU, and it is not installed"
    # For a GPU only a small launcher in C is compiled on the host.
    known = "g++ clang++ c++ gcc" if on_gpu else "g++ clang++ c++"
    compilers = os.environ.get("CXX") or known
    if any(map(shutil.which, compilers.split())):
        return ""
    return f"torch.compile needs a C++ compiler, and there is none of {compilers}"


@contextmanager
def watched_clocks(device: torch.device) -> Iterator[dict[str, float]]:
    """Ask nvidia-smi every tenth of a second, and on leaving fill in the medians: sm_clock_mhz, power_w.

    Samples of an idle GPU do not count. Without an NVIDIA GPU, or without nvidia-smi, nothing is filled in.
    """
    medians = {}
    if device.type != "cuda" or not shutil.which("nvidia-smi"):
        yield medians
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    command = f"nvidia-smi -i GPU-{uuid} {_CLOCKS} --format=csv,noheader,nounits -lms 100".split()
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield medians
    finally:
        watch.terminate()
        text = io.StringIO(watch.communicate()[0])
        samples = pd.read_csv(text, names=["sm_clock_mhz", "power_w", "busy"])
        # A field may be "[N/A]", and the last line may be cut.
        samples = samples.apply(pd.to_numeric, errors="coerce").dropna().query("busy > 90")
        medians.update(samples.drop(columns="busy").median().dropna())
