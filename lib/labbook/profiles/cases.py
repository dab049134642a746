"""Cases under a profiler, here or in one process of Nsight Systems: their rows of kernels and ranges."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from labbook.bench import Case
from labbook.profiles.nsight import read_export, record_report
from labbook.profiles.program import range_of
from labbook.profiles.table import (
    Profile,
    ProfileError,
    kernel_rows,
    kernel_table,
    range_table,
    within,
)
from labbook.profiles.torch_trace import keep_one_step, record_trace
from labbook.timing import release_memory, run_or_out_of_memory

Program = Callable[[Case], Callable[[], Any]]
Tables = dict[str, list[dict[str, Any]]]


def profile_cases(
    program: Program,
    cases: Iterable[Case],
    source: str,
    stem: Path,
    *,
    keep: Callable[[Case], bool],
    skip: Callable[[Case], str],
) -> Iterator[Tables]:
    """Of each case its rows by table: what a profiler saw, or a status and the reason.

    program: warms a case up, and returns what is to be profiled.
    source: "torch" (torch.profiler, here), or "nsys": one process under Nsight Systems for all cases, which
        gets them and the program as a pickle.
    stem: of what is left of the cases to `keep`: <stem>.nsys-rep, or <stem>-<pass>-<context>-<dtype>.json.gz,
        one step for Perfetto.
    skip: why a case cannot run here, or "".
    """
    runnable = []
    for case in cases:
        reason = skip(case)
        if reason:
            yield _rows(case, source, ("skipped", reason))
        else:
            runnable.append(case)
    if source == "nsys" and runnable:
        yield from _under_nsys(program, runnable, stem, any(map(keep, runnable)))
    elif runnable:
        for case in runnable:
            names = [case[name] for name in ("pass", "context_length", "dtype") if name in case]
            own = _file(stem, "".join(f"-{name}" for name in names))
            record = partial(_record_here, program, case, own)
            with _only_kept(own, keep(case)):
                yield _rows(case, source, _attempt(record, case))


def _record_here(program: Program, case: Case, stem: Path) -> Profile:
    trace = _file(stem, ".json")
    profile = record_trace(program(case), trace, device=case.device)
    keep_one_step(trace, _file(stem, ".json.gz"))
    return profile


def _under_nsys(program: Program, cases: list[Case], stem: Path, keep: bool) -> Iterator[Tables]:
    pickled = _file(stem, ".pickle")
    pickled.write_bytes(cloudpickle.dumps((program, cases)))
    command = [sys.executable, "-m", "labbook.profiles.program", str(pickled)]
    with _only_kept(stem, keep):
        found = _attempt(lambda: read_export(record_report(command, stem)), cases[0])
        # Why a case could not run; where the process failed there is no list.
        reasons = [""] * len(cases)
        with suppress(FileNotFoundError):
            reasons = json.loads(_file(stem, ".pickle.json").read_text())
        for number, (case, reason) in enumerate(zip(cases, reasons, strict=True)):
            result = found
            if reason:
                result = "oom", reason
            elif isinstance(found, Profile):
                result = _attempt(partial(within, found, range_of(number)), case)
            yield _rows(case, "nsys", result)


Result = Profile | tuple[str, str]  # or a status and the reason


def _attempt(record: Callable[[], Profile], case: Case) -> Result:
    try:
        profile, reason = run_or_out_of_memory(record, case.device)
    except ProfileError as error:
        is_memory = "out of memory" in str(error).lower()
        return "oom" if is_memory else "error", str(error)
    finally:
        release_memory(case.device)
    return ("oom", reason) if profile is None else profile


def _rows(case: Case, source: str, result: Result) -> Tables:
    if isinstance(result, Profile):
        ranges = range_table(result).to_dict("records")
        tables = {"kernels": kernel_rows(kernel_table(result)), "ranges": ranges}
    else:
        status, reason = result
        rows = [{"status": status, "reason": reason}]
        tables = {"kernels": rows, "ranges": rows}
    profiler = source if source == "nsys" else f"torch {case.device.type}"
    columns = case | {"profiler": profiler}
    return {table: [columns | row for row in rows] for table, rows in tables.items()}


@contextmanager
def _only_kept(stem: Path, keep: bool) -> Iterator[None]:
    """Leave of the files that are made inside what is for a viewer, and that only if it is to be kept."""
    try:
        yield
    finally:
        endings = [".json", ".pickle", ".pickle.json", ".sqlite"]
        if not keep:
            endings += [".json.gz", ".nsys-rep"]
        for ending in endings:
            _file(stem, ending).unlink(missing_ok=True)


def _file(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)
