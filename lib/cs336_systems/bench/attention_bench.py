"""Why an attention cannot run here, for the benches that remain."""

import torch

from cs336_systems.attention.implementations import ATTENTION, COMPILER
from labbook.machine import why_no_compile, why_no_tf32


def why_no_attention(name: str, dtype: str, device: torch.device) -> str:
    """Why one of ATTENTION cannot run in this dtype on the device; others need nothing."""
    if name not in ATTENTION:
        return ""
    return (
        ATTENTION[name].why_not(dtype, device)
        or (why_no_tf32(device) if dtype == "tf32" else "")
        or (why_no_compile(device) if COMPILER in ATTENTION[name].needs else "")
    )
