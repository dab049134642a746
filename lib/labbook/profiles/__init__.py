"""Profiles of Nsight Systems or torch.profiler, as one table of kernels under the ranges they serve."""

import os

from labbook import offered

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch.profiler writes a log to stderr

__getattr__, __all__ = offered(
    "labbook.profiles",
    {
        "lanes": "exposed lane_rows overlap_values record_steps step_lanes told_apart",
        "names": "short_name",
        "nsight": "count_kernels read_export record_report why_no_nsys",
        "table": "Profile ProfileError covered kernel_rows kernel_table one_step range_table stages",
        "torch_trace": "keep_one_step read_trace record_trace",
    },
)
