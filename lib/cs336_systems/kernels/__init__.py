"""Triton kernels other than attention's, and what all kernels need from the machine (runtime).

weighted_sum is the handout's worked example; rms_norm, rotary, swiglu and cross_entropy are the fused kernels
of a training step. Each is imported by its own name: it needs triton.
"""

from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None  # not on macOS


def why_no_triton(device: torch.device) -> str:
    """Why the kernels cannot run on the device; "" where they can."""
    if not HAS_TRITON:
        return "our kernels need triton, which is not installed"
    from cs336_systems.kernels.runtime import INTERPRETED  # imports triton

    if device.type == "cuda" or INTERPRETED:
        return ""
    return "where there is a GPU our kernels run on it; on a CPU in the interpreter (TRITON_INTERPRET=1)"
