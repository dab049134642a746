"""Nsight Systems: run a command under nsys, read what it saw into a `Profile`."""

import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pandas as pd

from labbook.profiles.table import Profile, ProfileError, launched


def why_no_nsys() -> str:
    """Why nsys cannot profile here, and what would help; empty if it can."""
    return "" if shutil.which("nsys") else "nsys is not on PATH; install Nsight Systems"


def nsys_command(command: list[str], stem: Path) -> list[str]:
    """`nsys profile` of what a command does from cudaProfilerStart to cudaProfilerStop.

    Kernels of CUDA graphs one by one, not each graph as a whole. No CPU sampling, no context switches: they
    make the stream gigabytes large, and nothing here reads them.
    """
    options = ["--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none", "--cpuctxsw=none"]
    options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"]
    return ["nsys", "profile", *options, f"--output={stem}", *command]


def record_report(command: list[str], stem: Path) -> Path:
    """Run `nsys_command` and export its report: <stem>.nsys-rep for the viewer, <stem>.sqlite (returned).

    Raises:
        ProfileError: there is no nsys, the command failed, or nsys could not make a report of it.
    """
    if reason := why_no_nsys():
        raise ProfileError(f"{reason}, or take torch.profiler as the source")
    stem = stem.absolute()
    stem.parent.mkdir(parents=True, exist_ok=True)
    report, export = (stem.with_name(stem.name + end) for end in (".nsys-rep", ".sqlite"))
    for old in (report, export):
        old.unlink(missing_ok=True)
    log = _run(nsys_command(command, stem))
    if failure := _python_error(log):
        raise ProfileError(f"{' '.join(command)!r} failed under nsys: {failure}")
    if not report.exists():
        raise ProfileError(f"nsys made no report of {' '.join(command)!r}; its log ends: {log[-400:]}")
    log = _run(["nsys", "export", "--type=sqlite", f"--output={export}", str(report)])
    if not export.exists():
        raise ProfileError(f"nsys could not export {report.name}; its log ends: {log[-400:]}")
    return export


def _run(command: list[str]) -> str:
    """Run to the end, whatever the exit code (files tell whether it worked), and return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return (done.stdout + done.stderr).replace("\r", "\n")


def _python_error(log: str) -> str:
    """The last line of a traceback that the profiled program printed; nsys reports on what ran until then."""
    _, traceback, said = log.rpartition("Traceback (most recent call last)")
    errors = re.findall(r"^[\w.]*\w(?:Error|Exception|Interrupt)(?::.*)?$", said, re.MULTILINE)
    return (errors or ["it ended with a traceback"])[0] if traceback else ""


# What ran on the GPU, by its table: its name, in SQL. By default a CUDA graph is traced as a whole.
_NAMES = {
    "KERNEL": "(SELECT value FROM StringIds WHERE id = demangledName)",
    "MEMCPY": "'Memcpy ' || CASE copyKind WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' WHEN 8 THEN 'DtoD' "
    "WHEN 10 THEN 'PtoP' ELSE 'other' END",
    "MEMSET": "'Memset'",
    "GRAPH_TRACE": "'CUDA graph'",
}
_RAN = """
SELECT {name} AS name, replace(lower('{table}'), '_trace', '') AS kind, streamId AS stream,
       (globalPid >> 24) << 24 AS process, correlationId AS correlation, start AS start_ns, end AS end_ns
FROM CUPTI_ACTIVITY_KIND_{table}"""
_CALLS = """
SELECT (globalTid >> 24) << 24 AS process, globalTid AS thread, correlationId AS correlation,
       (SELECT value FROM StringIds WHERE id = nameId) AS name, start AS start_ns, end AS end_ns
FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY start"""
# Ranges (push-pop and start-end) of the default domain; libraries annotate themselves in their own.
_RANGES = """
SELECT (globalTid >> 24) << 24 AS process, globalTid AS thread,
       coalesce(text, (SELECT value FROM StringIds WHERE id = textId)) AS name, start AS start_ns,
       coalesce(end, (SELECT max(end) FROM CUPTI_ACTIVITY_KIND_RUNTIME)) AS end_ns
FROM NVTX_EVENTS
WHERE eventType IN (59, 60) AND coalesce(domainId, 0) = 0 AND start IS NOT NULL ORDER BY start"""


def read_export(path: Path) -> Profile:
    """Read a SQLite export of Nsight Systems 2021.2 or newer.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: it is no export, is cut off, is of too old a schema, or has no kernels, no NVTX ranges,
            no calls of the CUDA API, or some without a name.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no Nsight Systems export {path}; make one with nsys.record_report")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as export:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = {table.removeprefix("CUPTI_ACTIVITY_KIND_") for (table,) in export.execute(query)}
            export.execute("SELECT value FROM StringIds LIMIT 1")  # every export has it
            ran = [table for table in _NAMES if table in tables]  # what did not happen has no table
            if ran and "RUNTIME" not in tables:
                raise ProfileError(
                    f"{path.name} has no calls of the CUDA API, which tell what launched a kernel; record "
                    "with --trace=cuda,nvtx and export all tables"
                )
            found = [pd.read_sql_query(_RAN.format(table=table, name=_NAMES[table]), export) for table in ran]
            calls = pd.read_sql_query(_CALLS, export) if ran else pd.DataFrame()
            ranges = pd.read_sql_query(_RANGES, export) if "NVTX_EVENTS" in tables else pd.DataFrame()
    except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
        raise ProfileError(
            f"{path.name} is damaged or no SQLite export of Nsight Systems 2021.2 or newer ({error}); export "
            f"the report again: nsys export --type=sqlite {path.stem}.nsys-rep"
        ) from None
    kernels = launched(pd.concat(found), calls) if ran else pd.DataFrame()
    profile = Profile(ranges, kernels, calls)
    calls["name"] = calls.name.str.replace(r"_v\d+$", "", regex=True)
    return profile
