"""What is swept for each family of problems. A bench yields rows of one table; its caller saves them.

Imported on first use: `python -m cs336_systems.bench.profile_bench` must not find itself imported already.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "attention_bench": ("sweep_attention",),
    "model_bench": ("cold_start_steps", "model_key", "sweep_model"),
    "collectives_bench": ("benchmark_collectives", "time_collectives"),
    "ddp_bench": ("DDP_SLUGS", "DataParallelSteps", "benchmark_ddp"),
    "sharding_bench": (
        *("SHARDING_SLUG", "ShardedSteps", "already_measured", "benchmark_sharding", "profile_sharding"),
    ),
    "overlap_bench": ("profile_lanes", "profile_overlap"),
    "drift_bench": ("training_drift",),
    "full_step_bench": ("benchmark_full_step",),
    "sent_bytes": ("RINGS", "count_optimizer_bytes", "count_ring_bytes", "count_sent_bytes"),
    "step_logs": ("log_gathers", "log_messages"),
    "checkpointing_bench": ("block_bytes", "sweep_checkpointing"),
    "flash_bench": ("Cell", "leaderboard_step", "time_cell"),
    "flash_sweep": ("grid_cells", "model_cells", "time_cells"),
    "memory_bench": ("block_rows", "memory_rows"),
    "profile_bench": ("Target", "choose_source", "profile_rows"),
    "kernel_resources": ("shipped_tiles", "sweep_resources"),
    "step_kernels": ("sweep_step_kernels",),
    "tile_bench": ("sweep_tiles",),
    "weighted_sum_bench": ("sweep_weighted_sum",),
}
_OFFERED = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_OFFERED]


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)
