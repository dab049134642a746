"""Profiles of Nsight Systems or torch.profiler, as one table of kernels under the ranges they serve."""

import os

from labbook.profiles.cases import profile_cases
from labbook.profiles.gathers import gather_times
from labbook.profiles.lanes import (
    exposed, lane_rows, overlap_values, record_steps, step_lanes, activity_spans,
)  # fmt: skip
from labbook.profiles.nsight import count_kernels, read_export, why_no_nsys
from labbook.profiles.table import (
    Profile, covered, kernel_table, one_step, stages,
)  # fmt: skip
from labbook.profiles.torch_trace import read_trace

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch.profiler writes a log to stderr
