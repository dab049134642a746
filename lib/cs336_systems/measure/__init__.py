"""Everything that takes a number off a machine, and the rows that keep it.

Names are imported on first use: the command line must start at once.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "allocations": (
        *("CATEGORIES", "MemoryHistory", "largest_allocations", "read_history", "stage_peaks"),
        *("timeline", "timeline_of_rows", "timeline_rows"),
    ),
    "clocks": ("watched_clocks",),
    "distributed_timing": ("one_step_ms", "slowest", "time_together"),
    "files": ("REPOSITORY_FIGURES", "figures_dir", "find", "make_folder", "write_atomically"),
    "kernel_names": ("CLASSES", "kernel_class", "short_name"),
    "machine": ("MachineCard", "load_card", "machine_card", "machines"),
    "memory_recording": ("record_memory", "record_snapshot"),
    "model_steps": ("ModelSteps", "autocast"),
    "nsys": ("find_nsys", "read_export", "why_no_nsys"),
    "op_bytes": ("operations", "sum_of_rooflines_ms"),
    "overlap": ("LANES", "covered", "exposed", "merged", "overlap_values", "step_lanes"),
    "profile": (
        *("Profile", "ProfileError", "class_shares", "kernel_table", "one_step", "range_paths"),
        *("range_table", "top_kernels"),
    ),
    "requirements": ("GIB", "why_no_compile", "why_no_triton"),
    "rows": ("compact", "load_machines", "load_rows", "published", "save_rows"),
    "saved_tensors": ("contributors", "saved_bytes", "saved_for_backward"),
    "schema": ("COLUMNS", "KEYS", "TABLES"),
    "subprocesses": ("in_fresh_process", "in_processes"),
    "timing": (
        *("MIB", "Timing", "matmul_precision", "release_memory", "resolve_device"),
        *("run_or_out_of_memory", "time_cold_cache", "time_compiled", "time_steps"),
    ),
    "torch_trace": ("keep_one_step", "read_trace"),
    "validation": ("RowError", "measured_in_order"),
}
_OFFERED = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_OFFERED]


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)
