"""Cases under a profiler, here or in one process of Nsight Systems: their rows of kernels and ranges."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import cloudpickle

from labbook.bench import Case
from labbook.profiles.nsight import read_export, record_report
from labbook.profiles.program import range_of
from labbook.profiles.table import ProfileError, kernel_rows, kernel_table, range_table, within
from labbook.profiles.torch_trace import record_trace
from labbook.timing import release_memory, run_or_out_of_memory

_NAMED = ("pass", "context_length", "dtype")  # by the file that is kept


def profile_cases(
    program: Callable,
    cases: Iterable[Case],
    source: str,
    stem: Path,
    *,
    keep: Callable,
    skip: Callable,
) -> Iterator[dict]:
    """Of each case its rows by table: what a profiler saw, or a status and the reason.

    A case gets the column "profiler".

    program: warms a case up, and returns what is to be profiled.
    source: "torch" (torch.profiler, here), or "nsys": one process under Nsight Systems for all cases, which
        gets them and the program as a pickle.
    stem: of what is left of the cases to `keep`: <stem>.nsys-rep, or <stem>-<pass>-<context>-<dtype>.json.gz
        for Perfetto.
    skip: why a case cannot run here, or "".
    """
    runnable = []
    for case in cases:
        case["profiler"] = source if source == "nsys" else f"torch {case.device.type}"
        if reason := skip(case):
            yield _failed(case, "skipped", reason)
        else:
            runnable.append(case)
    if runnable:
        under = _under_nsys if source == "nsys" else _under_torch
        with TemporaryDirectory() as scratch:
            yield from under(program, runnable, stem, keep, Path(scratch))


def _under_torch(program, cases, stem, keep, scratch):
    trace = scratch / "trace.json.gz"
    for case in cases:
        yield _rows(case, partial(_record_here, program, case, trace))
        if trace.exists() and keep(case):
            names = [f"-{case[name]}" for name in _NAMED if name in case]
            shutil.move(trace, f"{stem}{''.join(names)}.json.gz")
        trace.unlink(missing_ok=True)


def _record_here(program, case, trace):
    return record_trace(program(case), trace, device=case.device)


def _under_nsys(program, cases, stem, keep, scratch):
    """All cases in one process and one report, which is cut at their ranges.

    If it fails, so does every case but those of which the process had noted that memory ran out.
    """
    pickled = scratch / "cases"
    pickled.write_bytes(cloudpickle.dumps((program, cases)))
    command = [sys.executable, "-m", "labbook.profiles.program", str(pickled)]
    failure = ""
    # Why a case could not run; where the process failed there is no list.
    reasons = [""] * len(cases)
    try:
        profile = read_export(record_report(command, scratch / "all"))
    except ProfileError as error:
        failure = str(error)
    with suppress(FileNotFoundError):
        reasons = json.loads((scratch / "cases.json").read_text())
    for number, (case, reason) in enumerate(zip(cases, reasons, strict=True)):
        if reason:
            yield _failed(case, "oom", reason)
        elif failure:
            yield _failed(case, "error", failure)
        else:
            yield _rows(case, partial(within, profile, range_of(number)))
    report = scratch / "all.nsys-rep"
    if report.exists() and any(map(keep, cases)):
        shutil.move(report, f"{stem}.nsys-rep")


def _rows(case, record):
    """What is recorded, or why it could not be."""
    try:
        profile, reason = run_or_out_of_memory(record, case.device)
        if profile is None:
            return _failed(case, "oom", reason)
        ranges = range_table(profile).to_dict("records")
        return _tables(case, kernel_rows(kernel_table(profile)), ranges)
    except ProfileError as error:
        return _failed(case, "error", str(error))
    finally:
        release_memory(case.device)


def _failed(case, status, reason):
    rows = [{"status": status, "reason": reason}]
    return _tables(case, rows, rows)


def _tables(case, kernels, ranges):
    return {"kernels": [case | row for row in kernels], "ranges": [case | row for row in ranges]}
