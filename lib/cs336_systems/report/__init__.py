"""Everything that shows numbers: plots, tables, answers. Reads rows, measures nothing."""

from cs336_systems.lazy_exports import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "baseline_tables": "HOST KERNELS fallen_short fastest_baseline grouped host_bound",
        "ddp_tables": "fit_collective of_run with_model with_wrapper",
        "profile_tables": "attention_parts beside_wall_clock by_scope leaders "
        "of_main_profiler shares softmax_over_matmuls two_profilers",
        "scaling_plots": "limit_lines region ring_timeline",
        "step_plots": "tradeoff",
        "timelines": "kernel_timeline memory_timeline nsys_timeline overlap_timeline",
    },
)
