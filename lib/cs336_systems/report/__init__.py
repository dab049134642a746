"""Everything that shows numbers: plots, tables, answers. Reads rows, measures nothing.

Names are imported on first use: a command line that needs a label does not wait for seaborn.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "answers": "Claim answer between claim gib ms note_kernels one percent plural ratio_text",
    "baseline_tables": "FEW HOST SLOW ablation fallen_short fastest_baseline grouped host_bound",
    "compare": "beside_reference longest_warmup published_rows side_by_side times_in with_model with_wrapper",
    "ddp_tables": "fastest fit_collective of_run on_gpus stages strong_and_weak",
    "labels": "MISSING SCOPES column_label context_label named_value ordered significant value_label",
    "plots": "bars heatmap lines ratio stacked_bars tradeoff waterfall",
    "profile_tables": "attention_parts beside_wall_clock by_scope explained_peaks leaders of_main_profiler "
    "shares softmax_over_matmuls two_profilers",
    "scaling_plots": "limit_lines region ring_timeline",
    "source": "show_source",
    "tables": "pivot show",
    "timelines": "kernel_timeline memory_timeline overlap_timeline",
}
_OFFERED = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [*_OFFERED]


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)
