"""Nsight Systems: find nsys, run a command under it, read what it saw into a `Profile`."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pandas as pd

from labbook.profiles.table import Profile, ProfileError

NSIGHT_COMPUTE = Path("/opt/nvidia/nsight-compute")


def find_nsys() -> tuple[Path | None, Path | None]:
    """nsys on PATH; else the newest one inside a Nsight Compute, and the importer that makes its reports."""
    if program := shutil.which("nsys"):
        return Path(program), None
    programs = NSIGHT_COMPUTE.glob("*/host/target-linux-x64/nsys")
    for program in sorted(programs, key=lambda path: [*map(int, re.findall(r"\d+", path.parts[-4]))])[-1:]:
        return program, next(program.parents[1].glob("linux-desktop-*/QdstrmImporter"), None)
    return None, None


def _environment(importer: Path | None) -> dict[str, str]:
    """For making and exporting reports: the importer looks for its libraries in LD_LIBRARY_PATH only.

    Not for profiling: the profiled program would find Nsight's copies of common libraries before its own.
    """
    paths = [str(importer.parent)] if importer else []
    paths += [path for path in [os.environ.get("LD_LIBRARY_PATH")] if path]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}


def why_no_nsys() -> str:
    """Why nsys cannot profile here, and what would help; empty if it can."""
    program, importer = find_nsys()
    if program is None:
        return "nsys is neither on PATH nor inside a Nsight Compute; install Nsight Systems"
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libdw.so.1')"]  # Nsight Compute has none
    if importer and subprocess.run(load, env=_environment(importer), capture_output=True).returncode:
        return (
            "the nsys inside Nsight Compute cannot make reports without libdw.so.1; install libdw1 with all "
            "that it needs, or name the folders that hold it in LD_LIBRARY_PATH"
        )
    return ""


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
        ProfileError: there is no nsys that can, the command failed, or nsys could not make a report of it.
    """
    if reason := why_no_nsys():
        raise ProfileError(f"{reason}, or take torch.profiler as the source")
    program, importer = find_nsys()
    stem = stem.absolute()
    stem.parent.mkdir(parents=True, exist_ok=True)
    raw, report, export = (stem.with_name(stem.name + end) for end in (".qdstrm", ".nsys-rep", ".sqlite"))
    for old in (raw, report, export):
        old.unlink(missing_ok=True)
    log = _run([program, *nsys_command(command, stem)[1:]], dict(os.environ))
    if failure := _python_error(log):
        raise ProfileError(f"{' '.join(command)!r} failed under nsys: {failure}")
    if not report.exists() and importer:
        # Beside the report that it could not make, or where it says that it left it.
        streams = [raw, *map(Path, re.findall(r"/\S+\.qdstrm\b", log))]
        for stream in [stream for stream in streams if stream.exists()][:1]:
            log += _run([importer, "-i", stream, "-o", report], _environment(importer))
    if not report.exists():
        raise ProfileError(f"nsys made no report of {' '.join(command)!r}; its log ends: {log[-400:]}")
    to_sqlite = ["--type=sqlite", "--force-overwrite=true", f"--output={export}", report]
    log = _run([program, "export", *to_sqlite], _environment(importer))
    if not export.exists():
        raise ProfileError(f"nsys could not export {report.name}; its log ends: {log[-400:]}")
    raw.unlink(missing_ok=True)
    return export


# What ran on the GPU, by its table: its name, in SQL. By default a CUDA graph is traced as a whole.
_NAMES = {
    "KERNEL": "(SELECT value FROM StringIds WHERE id = a.demangledName)",
    "MEMCPY": "'Memcpy ' || CASE a.copyKind WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' WHEN 8 THEN 'DtoD' "
    "WHEN 10 THEN 'PtoP' ELSE 'other' END",
    "MEMSET": "'Memset'",
    "GRAPH_TRACE": "'CUDA graph'",
}
# The call that launched it has its correlation id and process; of several such calls, one inside the other or
# long after, the last that began before it. With max() SQLite takes the other columns from that row.
_LAUNCHES = """
SELECT {name} AS name, '{kind}' AS kind, a.globalPid AS process, r.globalTid AS thread, a.streamId AS stream,
       coalesce(max(r.start), a.start) AS launch_ns, a.start AS start_ns, a.end AS end_ns
FROM CUPTI_ACTIVITY_KIND_{table} a LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r
  ON r.correlationId = a.correlationId AND (r.globalTid >> 24) = (a.globalPid >> 24) AND r.start <= a.start
GROUP BY a.rowid"""
# Calls of the CUDA API, on all threads.
_CALLS = """
SELECT (globalTid >> 24) << 24 AS process, globalTid AS thread,
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
            gpus = export.execute("SELECT DISTINCT name FROM TARGET_INFO_GPU ORDER BY name").fetchall()
            found = [kind for kind in _NAMES if kind in tables]  # what did not happen has no table
            if found and "RUNTIME" not in tables:
                raise ProfileError(
                    f"{path.name} has no calls of the CUDA API, which tell what launched a kernel; record "
                    "with --trace=cuda,nvtx and export all tables"
                )
            launches = [pd.read_sql_query(_launches(table), export) for table in found]
            profile = Profile(
                source="nsys",
                machine=", ".join(name or "a GPU without a name" for (name,) in gpus),
                ranges=pd.read_sql_query(_RANGES, export) if "NVTX_EVENTS" in tables else pd.DataFrame(),
                kernels=pd.concat(launches, ignore_index=True) if launches else pd.DataFrame(),
                calls=pd.read_sql_query(_CALLS, export) if found else pd.DataFrame(),
            )
    except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
        raise ProfileError(
            f"{path.name} is damaged or no SQLite export of Nsight Systems 2021.2 or newer ({error}); export "
            f"the report again: nsys export --type=sqlite {path.stem}.nsys-rep"
        ) from None
    for what, frame in (("kernels", profile.kernels), ("ranges", profile.ranges), ("calls", profile.calls)):
        if count := frame.name.isna().sum():
            raise ProfileError(f"{path.name}: {count} of {len(frame)} {what} have no name; export it again")
    profile.calls["name"] = profile.calls.name.str.replace(r"_v\d+$", "", regex=True)
    return profile


def _launches(table: str) -> str:
    return _LAUNCHES.format(table=table, name=_NAMES[table], kind=table.lower().removesuffix("_trace"))


def _run(command: list, environment: dict[str, str]) -> str:
    """Run to the end, whatever the exit code (files tell whether it worked), and return what it printed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    return (done.stdout + done.stderr).replace("\r", "\n")


def _python_error(log: str) -> str:
    """The last line of a traceback that the profiled program printed; nsys reports on what ran until then."""
    _, traceback, said = log.rpartition("Traceback (most recent call last)")
    errors = re.findall(r"^[\w.]*\w(?:Error|Exception|Interrupt)(?::.*)?$", said, re.MULTILINE)
    return (errors or ["it ended with a traceback"])[0] if traceback else ""
