"""What takes a number off a machine and knows the course; the rest is labbook's."""

from cs336_systems.lazy_exports import lazy_exports
from labbook import memory

# Names by which notebooks know what is labbook's.
operations, sum_of_rooflines_ms = memory.operations_of, memory.sum_of_rooflines_ms
saved_bytes, storage_bytes = memory.saved_bytes, memory.storage_bytes
record_memory, stage_peaks = memory.record_memory, memory.stage_peaks
timeline, timeline_rows = memory.timeline, memory.timeline_rows
__getattr__, __all__ = lazy_exports(
    __name__,
    {"collective_calls": "watch_collectives", "overlap": "covered exposed overlap_values step_lanes"},
)
