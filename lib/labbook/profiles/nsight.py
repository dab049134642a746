"""Nsight Systems: run a command under nsys, read what it saw into a `Profile`.

And Nsight Compute: what the hardware counts while a kernel runs.
"""

import io
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pandas as pd

from labbook.profiles.table import Profile, ProfileError, complete

# What a program does from cudaProfilerStart to cudaProfilerStop; kernels of CUDA graphs one by one. No CPU
# sampling, no context switches: they make the stream gigabytes large, and nothing here reads them.
_PROFILE = (
    "nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none "
    "--capture-range=cudaProfilerApi --capture-range-end=stop --export=sqlite --force-overwrite=true"
)


def why_no_nsys() -> str:
    """Why nsys cannot profile here, and what would help; empty if it can."""
    return "" if shutil.which("nsys") else "nsys is not on PATH; install Nsight Systems"


def record_report(command: list[str], stem: Path) -> Path:
    """Profile a command: <stem>.nsys-rep for the viewer and its export <stem>.sqlite (returned), both new.

    Raises ProfileError: there is no nsys, the command failed, or nsys could not make a report of it.
    """
    if reason := why_no_nsys():
        raise ProfileError(f"{reason}, or take torch.profiler as the source")
    export = stem.with_suffix(".sqlite")
    # Whatever the exit code: files tell whether it worked, and a program that failed has a report, too.
    completed = subprocess.run(
        _PROFILE.split() + [f"--output={stem}"] + command,
        capture_output=True,
        errors="replace",
    )
    log = completed.stdout + completed.stderr
    if not export.exists() or "Traceback (most recent call last)" in log:
        raise ProfileError(f"{command} failed under nsys: {' '.join(log.split())[-400:]}")
    return export


_STRING = "(SELECT value FROM StringIds WHERE id = {})".format
_COPY = "CASE copyKind WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' WHEN 8 THEN 'DtoD' WHEN 10 THEN 'PtoP'"
_RANGES = "NVTX_EVENTS WHERE eventType IN (59, 60) AND coalesce(domainId, 0) = 0 AND start NOTNULL"
_CALL = ("globalTid", "-1", "correlationId")
_ACTIVITY = ("globalPid", "streamId", "correlationId")
# By what follows FROM, a table, of ranges with a WHERE: kind, name, and thread, stream and correlation of an
# event. Ranges are push-pop and start-end, of the default domain: libraries annotate in their own. By default
# a CUDA graph is traced as a whole.
_TABLES = {
    _RANGES: ("range", f"coalesce(text, {_STRING('textId')})", ("globalTid", "-1", "NULL")),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("call", _STRING("nameId"), _CALL),
    "CUPTI_ACTIVITY_KIND_KERNEL": ("kernel", _STRING("demangledName"), _ACTIVITY),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("memcpy", f"'Memcpy ' || {_COPY} ELSE 'other' END", _ACTIVITY),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("memset", "'Memset'", _ACTIVITY),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("graph", "'CUDA graph'", _ACTIVITY),
}


def read_export(path: Path) -> Profile:
    """Read a SQLite export of Nsight Systems 2021.2 or newer.

    Raises ProfileError: it is not there, no export, cut off, of too old a schema, or has no calls of the CUDA
        API; or see `complete` and `Profile`.
    """
    address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as export:
            events = _events(export, path.name)
    except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
        raise ProfileError(
            f"{path.name} is damaged or no SQLite export of Nsight Systems 2021.2 or newer ({error}); "
            "export the report again"
        ) from None
    return Profile(complete(events, path.name))


def _events(export, source):
    names = {name for (name,) in export.execute("SELECT name FROM sqlite_master")}
    if "CUPTI_ACTIVITY_KIND_RUNTIME" not in names:
        raise ProfileError(
            f"{source} has no calls of the CUDA API, which launch kernels; record with --trace=cuda,nvtx, "
            "and export all tables"
        )
    selects = [
        _select(table, kind, name, *columns)
        for table, (kind, name, columns) in _TABLES.items()
        if table.split()[0] in names
    ]
    return pd.read_sql_query(f"{' UNION ALL '.join(selects)} ORDER BY start_ns", export)


def _select(table, kind, name, thread, stream, correlation):
    """The query for the events of a table.

    A range that is still open ends with the last call, or where it began after that, at once. The lower 24
    bits of a globalTid are the thread: without them it is the globalPid of its process.
    """
    return f"""
SELECT '{kind}' AS kind, {name} AS name, {thread} >> 24 << 24 AS process, {thread} AS thread,
       {stream} AS stream, {correlation} AS correlation, start AS start_ns,
       coalesce(end, CASE '{kind}' WHEN 'range' THEN
           max(start, (SELECT max(end) FROM CUPTI_ACTIVITY_KIND_RUNTIME)) END) AS end_ns FROM {table}"""


_NCU = "ncu --csv --print-units=base --clock-control=none --profile-from-start=off"


def count_kernels(program: str, arguments, metrics: Iterable[str]) -> list[dict]:
    """Run a program under `ncu`, and count what it launches from cudaProfilerStart to cudaProfilerStop.

    The clock is left as it is: ncu's own is lower.

    program: its text, which finds `arguments`, as JSON, in sys.argv[1].
    metrics: of Nsight Compute, `ncu --query-metrics`.
    Returns for each kernel, in order: kernel, its name without arguments, and the metrics in base units.
    Raises FileNotFoundError: no ncu is on PATH. RuntimeError: it or the program failed, or no kernel ran.
    """
    command = f"{_NCU} --metrics={','.join(metrics)}".split()
    command += [sys.executable, "-c", program, json.dumps(arguments)]
    run = subprocess.run(command, capture_output=True, text=True)
    # Before the table stands what the program and ncu print.
    _, mark, table = run.stdout.partition('"ID"')
    if run.returncode or not mark:
        raise RuntimeError(f"ncu counted nothing: {(run.stdout + run.stderr)[-2000:]}")
    rows = pd.read_csv(io.StringIO(mark + table), thousands=",").astype({"Metric Value": float})
    rows["kernel"] = rows["Kernel Name"].str.extract(r"([^\s<(]+)(?:[<(]|$)")[0]
    kernels = rows.pivot(index=["ID", "kernel"], columns="Metric Name", values="Metric Value")
    return kernels.reset_index("kernel").to_dict("records")
