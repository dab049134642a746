"""Everything that takes a number off a machine, and the rows that keep it.

Names are imported on first use: the command line must start at once.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "allocations": ("MemoryHistory", "largest_allocations", "stage_peaks", "timeline", "timeline_of_rows"),
    "distributed_timing": ("one_step_ms", "slowest", "time_together"),
    "gathers": ("gather_times",),
    "files": ("REPOSITORY_FIGURES", "figures_dir", "find"),
    "machine": ("MachineCard", "load_card", "machine_card"),
    "memory_recording": ("record_memory", "record_snapshot"),
    "model_steps": ("ModelSteps",),
    "nsys": ("read_export", "why_no_nsys"),
    "op_bytes": ("operations", "sum_of_rooflines_ms"),
    "overlap": ("covered", "exposed", "overlap_values"),
    "profile": ("Profile", "ProfileError", "kernel_table", "one_step", "range_table"),
    "requirements": ("why_no_compile", "why_no_triton"),
    "rows": ("load_rows", "published", "save_rows"),
    "saved_tensors": ("saved_bytes", "saved_for_backward"),
    "timing": (
        *("MIB", "Timing", "matmul_precision", "release_memory", "resolve_device"),
        *("run_or_out_of_memory", "time_cold_cache", "time_compiled", "time_steps"),
    ),
    "torch_trace": ("read_trace",),
    "validation": ("RowError",),
}
_OFFERED = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_OFFERED]


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)
