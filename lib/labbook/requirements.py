"""What the host has, and what a run needs that a machine may lack: a reason, or "" if nothing is missing."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

GIB = 2**30


def core_count() -> int:
    """Cores that this process may use; macOS tells only how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory, or a container's share of it."""
    whole = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")  # of a control group, version 2; "max" where there is none
    text = limit.read_text().strip() if limit.exists() else ""
    return min(whole, int(text)) if text.isdigit() else whole


def available_memory_bytes() -> int:
    """Memory that this process could still take."""
    return min(psutil.virtual_memory().available, memory_bytes())


def why_no_tf32(device: torch.device) -> str:
    """Why the device has no TF32 matmuls."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return ""
    return "TF32 matmuls need a CUDA GPU of the Ampere generation or newer"


def why_no_memory(needed_bytes: int, device: torch.device) -> str:
    """Why a run of this size must not be tried on a CPU, where it would end the process.

    A GPU reports that it is out of memory and goes on, so there everything is tried.
    """
    if device.type == "cuda" or needed_bytes <= (available := available_memory_bytes()):
        return ""
    return f"needs about {needed_bytes / GIB:.1f} GiB, and {available / GIB:.1f} GiB are free"


def why_no_compile(device: torch.device) -> str:
    """Why torch.compile cannot make code for the device."""
    if device.type == "cuda" and find_spec("triton") is None:
        return "torch.compile needs triton to make code for a GPU, and it is not installed"
    given = os.environ.get("CXX")
    # For a GPU only a small launcher in C is compiled on the host.
    compilers = [given] if given else ["g++", "clang++", "c++", *(["gcc"] if device.type == "cuda" else [])]
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"torch.compile needs a C++ compiler, and there is none ({', '.join(compilers)})"
    return ""


def why_no_triton(device: torch.device) -> str:
    """Why our Triton kernels cannot run on the device."""
    if find_spec("triton") is None:
        return "our kernels need triton, which is not installed"
    from cs336_systems.kernels.runtime import INTERPRETED  # imports triton

    if device.type == "cuda" or INTERPRETED:
        return ""
    return "where there is a GPU our kernels run on it; on a CPU in the interpreter (TRITON_INTERPRET=1)"
