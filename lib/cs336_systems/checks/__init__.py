"""What "correct" means, for ours and for yours: attention, weighted sums, fused kernels, parallelism.

Names are imported on first use.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "attention_checks": ("BASIC", "EVERYTHING", "AttentionCase", "check_attention", "check_logsumexp"),
    "ddp_checks": ("check_ddp",),
    "flash_steps": (
        "check_backward",
        "check_delta",
        "check_forward",
        "check_gradients",
        "check_mask",
        "check_visit",
    ),
    "fsdp_checks": ("check_fsdp",),
    "fused_checks": ("FUSED", "check_fused", "check_weighted_sum"),
    "ring_checks": ("check_ring", "run_ring"),
    "sharded_optimizer_checks": ("check_sharded_optimizer",),
    "steps": ("step",),
    "tensor_parallel_checks": ("check_tensor_parallel",),
}
_OFFERED = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_OFFERED]


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)
