"""Memory: every allocation of a step, what is kept for backward, what operations read and write."""

from labbook import offered

__getattr__, __all__ = offered(
    "labbook.memory",
    {
        "history": "CATEGORIES MemoryHistory largest_allocations record_memory record_snapshot stage_peaks "
        "timeline timeline_of_rows timeline_rows",
        "operations": "operations_of saved_bytes saved_for_backward storage_bytes sum_of_rooflines_ms",
    },
)
