"""Memory: every allocation of a step, what is kept for backward, what operations read and write."""

from labbook.memory import allocations, operations, recording, saved

CATEGORIES, MemoryHistory = allocations.CATEGORIES, allocations.MemoryHistory
timeline, timeline_rows = allocations.timeline, allocations.timeline_rows
largest_allocations, stage_peaks = allocations.largest_allocations, allocations.stage_peaks
timeline_of_rows, storage_bytes = allocations.timeline_of_rows, saved.storage_bytes
operations_of, sum_of_rooflines_ms = operations.operations, operations.sum_of_rooflines_ms
record_memory, record_snapshot = recording.record_memory, recording.record_snapshot
saved_bytes, saved_for_backward = saved.saved_bytes, saved.saved_for_backward
