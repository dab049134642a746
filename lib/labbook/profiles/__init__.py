"""Profiles of Nsight Systems or torch.profiler, as one table of kernels under the ranges they serve."""

from labbook.profiles import nsys, table, torch_trace

Profile, ProfileError, attribute = table.Profile, table.ProfileError, table.attribute
kernel_rows, kernel_table, range_table = table.kernel_rows, table.kernel_table, table.range_table
one_step, stages, step_calls, union = table.one_step, table.stages, table.step_calls, table.union
nsys_command, read_export, why_no_nsys = nsys.nsys_command, nsys.read_export, nsys.why_no_nsys
keep_one_step, read_trace = torch_trace.keep_one_step, torch_trace.read_trace
