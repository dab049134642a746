"""Everything that shows numbers: plots, tables, answers. Reads rows, measures nothing."""

from cs336_systems.lazy_exports import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "answers": "Claim answer between claim gib ms note_kernels one percent plural ratio_text show_source",
        "baseline_tables": "HOST KERNELS ablation fallen_short fastest_baseline grouped host_bound",
        "compare": "beside_reference longest_warmup published_rows side_by_side times_in with_model "
        "with_wrapper",
        "ddp_tables": "fastest fit_collective of_run on_gpus stages strong_and_weak",
        "labels": "MISSING SCOPES column_label context_label named_value ordered significant value_label",
        "plots": "bars heatmap lines ratio stacked_bars tradeoff waterfall",
        "profile_tables": "attention_parts beside_wall_clock by_scope explained_peaks leaders "
        "of_main_profiler shares softmax_over_matmuls two_profilers",
        "scaling_plots": "limit_lines region ring_timeline",
        "tables": "pivot show",
        "timelines": "kernel_timeline memory_timeline nsys_timeline overlap_timeline",
    },
)
