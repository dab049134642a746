"""Memory: every allocation of a step, what is kept for backward, what operations read and write."""

from labbook.memory.history import (
    CATEGORIES,
    largest_allocations,
    record_memory,
    stage_peaks,
    timeline,
    timeline_of_rows,
    timeline_rows,
)
from labbook.memory.moments import held_at_peak, held_in_first_step
from labbook.memory.operations import (
    operations_of,
    saved_bytes,
    saved_for_backward,
    storage_bytes,
    sum_of_rooflines_ms,
)
