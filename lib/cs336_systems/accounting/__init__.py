"""Closed forms: what a model costs in parameters, FLOPs, bytes and seconds before anything is measured.

Pure functions of a `ModelConfig` and integers. They describe this repository's own eager model (`model.py`
with plain attention); the tests hold them against torch's FLOP counter, against the tensors that
autograd really saves, and against the storages alive during a step.
"""

from importlib import import_module
from typing import Any

from cs336_systems.accounting import checkpoint_costs, sharding_costs
from cs336_systems.accounting.attention_costs import (
    attention_flops,
    attention_part_bytes,
    attention_part_flops,
    attention_peak_breakdown,
    attention_peak_bytes,
    attention_saved_bytes,
    attention_traffic_bytes,
    flash_bytes,
    flash_flops,
    flash_scores,
)
from cs336_systems.accounting.collective_costs import (
    MB,
    AlphaBeta,
    algorithm_bandwidth_gbps,
    best_bucket_bytes,
    bus_bandwidth_gbps,
    bus_factor,
    equal_buckets_exposed_seconds,
    exposed_seconds,
    fit_alpha_beta,
    ring_seconds,
    torch_bucket_bytes,
)
from cs336_systems.accounting.element_counts import DTYPE_BYTES
from cs336_systems.accounting.flops import (
    backward_flops,
    flops_breakdown,
    forward_flops,
    optimizer_flops,
    parameter_breakdown,
    parameter_count,
    roofline_seconds,
    step_flops,
    utilisation,
)
from cs336_systems.accounting.hardware import Hardware, hardware, hardware_names
from cs336_systems.accounting.model_memory import (
    activation_bytes,
    block_activation_breakdown,
    gradient_bytes,
    head_activation_breakdown,
    optimizer_bytes,
    parameter_bytes,
    peak_bytes,
    peak_moments,
)
from cs336_systems.accounting.network import Links, Task, collective_finish, run_tasks, spans

# fmt: off
__all__ = [
    "DTYPE_BYTES", "MB", "AlphaBeta", "Hardware", "Links", "Task", "activation_bytes",
    "algorithm_bandwidth_gbps", "attention_flops", "attention_part_bytes", "attention_part_flops",
    "attention_peak_breakdown", "attention_peak_bytes", "attention_saved_bytes", "attention_traffic_bytes",
    "backward_flops", "best_bucket_bytes", "block_activation_breakdown", "bus_bandwidth_gbps", "bus_factor",
    "checkpoint_costs", "collective_finish", "equal_buckets_exposed_seconds", "exposed_seconds",
    "fit_alpha_beta", "flash_bytes", "flash_flops", "flash_scores", "flops_breakdown", "forward_flops",
    "gradient_bytes", "hardware", "hardware_names", "head_activation_breakdown", "optimizer_bytes",
    "optimizer_flops", "parameter_breakdown", "parameter_bytes", "parameter_count", "peak_bytes",
    "peak_moments", "ring_seconds", "roofline_seconds", "run_tasks", "scaling", "sharding_costs", "spans",
    "step_flops", "torch_bucket_bytes", "utilisation",
]


def __getattr__(name: str) -> Any:
    """`scaling` on first use: it imports sympy."""
    if name != "scaling":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
