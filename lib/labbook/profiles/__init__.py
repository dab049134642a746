"""Profiles of Nsight Systems or torch.profiler, as one table of kernels under the ranges they serve."""

from labbook.profiles import lanes, nsys, table
from labbook.profiles import torch_trace as trace

Profile, ProfileError, attribute = table.Profile, table.ProfileError, table.attribute
kernel_rows, kernel_table, range_table = table.kernel_rows, table.kernel_table, table.range_table
one_step, stages, step_calls, union = table.one_step, table.stages, table.step_calls, table.union
read_export, record_report, why_no_nsys = nsys.read_export, nsys.record, nsys.why_no_nsys
keep_one_step, read_trace, record_trace = trace.keep_one_step, trace.read_trace, trace.record
covered, exposed, overlap_values, told_apart = (
    lanes.covered,
    lanes.exposed,
    lanes.overlap_values,
    lanes.told_apart,
)
lane_rows, record_steps, step_lanes = lanes.lane_rows, lanes.record_steps, lanes.step_lanes
