"""Everything that takes a number off a machine, and the rows that keep it."""

from cs336_systems.lazy_exports import lazy_exports

__getattr__, __all__ = lazy_exports(
    __name__,
    {
        "allocations": "stage_peaks timeline timeline_of_rows timeline_rows",
        "collective_calls": "watch_collectives",
        "memory_recording": "record_memory record_snapshot",
        "op_bytes": "operations sum_of_rooflines_ms",
        "overlap": "covered exposed overlap_values step_lanes",
        "saved_tensors": "storage_bytes saved_bytes saved_for_backward",
    },
)
