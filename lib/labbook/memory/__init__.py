"""Memory: every allocation of a step, what is kept for backward, what operations read and write."""

from labbook import offered

__getattr__, __all__ = offered(
    "labbook.memory",
    {
        "allocations": "CATEGORIES MemoryHistory largest_allocations stage_peaks timeline timeline_of_rows "
        "timeline_rows",
        "operations": "operations_of sum_of_rooflines_ms",
        "recording": "record_memory record_snapshot",
        "saved": "saved_bytes saved_for_backward storage_bytes",
    },
)
