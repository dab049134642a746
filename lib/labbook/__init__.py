"""How a number becomes a row, a plot, a sentence; and how notebooks are run. Knows nothing of the course."""

from importlib import import_module

_NAMES = {  # by their module, which is imported when one is used
    "answers": "Claim answer between claim gib guessed ms one percent plural ratio_text show_source solution",
    "bench": "Case Step grid",
    "book.notebooks": "check_parameters",
    "files": "figures_dir find",
    "labels": "MISSING column_label named_value ordered significant value_label",
    "machine": "MachineCard load_card machine_card watched_clocks why_no_compile why_no_memory why_no_tf32 "
    "why_not",
    "page": "Page",
    "plots": "bars lines spans stacked_bars",
    "project": "configure",
    "ranks": "one_step_ms slowest",
    "rows": "RowError load_rows published save_rows",
    "sliders": "Sliders",
    "tables": "pivot row_lines show",
    "timing": "MIB Timing clock_ms matmul_precision release_memory resolve_device run_or_out_of_memory "
    "time_cold_cache time_compiled time_steps wait_for",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULE_OF)


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
