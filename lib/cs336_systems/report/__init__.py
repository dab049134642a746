"""Everything that shows numbers: plots, tables, answers. Reads rows, measures nothing."""

from cs336_systems.lazy_exports import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "ddp_tables": "fit_collective of_run with_model with_wrapper",
        "scaling_plots": "limit_lines ring_timeline",
        "step_plots": "tradeoff",
        "timelines": "call_kind kernel_timeline memory_timeline overlap_timeline",
    },
)
