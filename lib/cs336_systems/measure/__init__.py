"""Everything that takes a number off a machine, and the rows that keep it."""

from cs336_systems.lazy_exports import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "allocations": "timeline_of_rows",
        "distributed_timing": "one_step_ms slowest time_together",
        "files": "REPOSITORY_FIGURES figures_dir find",
        "gathers": "gather_times",
        "machine": "MachineCard load_card machine_card",
        "memory_recording": "record_memory record_snapshot",
        "model_steps": "ModelSteps",
        "nsys": "read_export why_no_nsys",
        "nsys_rows": "nsys_timeline",
        "op_bytes": "operations sum_of_rooflines_ms",
        "overlap": "covered exposed overlap_values",
        "profile": "Profile ProfileError kernel_table one_step range_table",
        "requirements": "why_no_compile why_no_triton",
        "rows": "load_rows published save_rows",
        "saved_tensors": "saved_bytes saved_for_backward",
        "timing": "MIB Timing matmul_precision release_memory resolve_device run_or_out_of_memory "
        "time_cold_cache time_compiled time_steps",
        "torch_trace": "read_trace",
        "validation": "RowError",
    },
)
