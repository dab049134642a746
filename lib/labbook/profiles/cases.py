"""A case under a profiler, here or under Nsight Systems: its rows of the tables kernels and ranges."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from labbook.profiles.nsight import read_export, record_report
from labbook.profiles.table import Profile, ProfileError, kernel_rows, kernel_table, range_table
from labbook.profiles.torch_trace import keep_one_step, record_trace
from labbook.timing import release_memory, run_or_out_of_memory

Program = Callable[[], Callable[[], Any]]


def profile_rows(
    program: Program, source: str, stem: Path, *, device: torch.device, keep: bool, skip: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """Rows by table: what a profiler saw, or a status and the reason.

    program: warms up, and returns what is to be profiled. nsys's process gets it as a pickle.
    source: "torch" (torch.profiler) or "nsys" (Nsight Systems).
    stem: of what is kept, with `keep`: <stem>.json.gz, one step for Perfetto, or <stem>.nsys-rep.
    skip: why the case cannot run here, if it cannot.
    """
    if skip:
        return _unmeasured("skipped", skip)
    try:
        profile, reason = run_or_out_of_memory(
            lambda: _record(program, source, stem, device), device
        )
    except ProfileError as error:
        is_memory = "out of memory" in str(error).lower()
        return _unmeasured("oom" if is_memory else "error", str(error))
    finally:
        release_memory(device)
        _tidy(stem, keep)
    if profile is None:
        return _unmeasured("oom", reason)
    ranges = range_table(profile).to_dict("records")
    return {"kernels": kernel_rows(kernel_table(profile)), "ranges": ranges}


def _record(program: Program, source: str, stem: Path, device: torch.device) -> Profile:
    if source == "torch":
        trace = _file(stem, ".json")
        profile = record_trace(program(), trace, device=device)
        keep_one_step(trace, _file(stem, ".json.gz"))
        return profile
    pickled = _file(stem, ".pickle")
    pickled.write_bytes(cloudpickle.dumps(program))
    command = [sys.executable, "-m", "labbook.profiles.program", str(pickled)]
    return read_export(record_report(command, stem))


def _unmeasured(status: str, reason: str) -> dict[str, list[dict[str, Any]]]:
    return {table: [{"status": status, "reason": reason}] for table in ("kernels", "ranges")}


def _tidy(stem: Path, keep: bool) -> None:
    endings = [".json", ".pickle", ".sqlite"]
    if not keep:
        endings += [".json.gz", ".nsys-rep"]
    for ending in endings:
        _file(stem, ending).unlink(missing_ok=True)


def _file(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)
