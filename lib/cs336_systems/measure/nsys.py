"""Nsight Systems: find nsys, run a command under it, read what it saw into a `Profile`."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from cs336_systems.measure.profile import Profile, ProfileError

NSIGHT_COMPUTE = Path("/opt/nvidia/nsight-compute")


@dataclass(frozen=True)
class Nsys:
    """A working nsys. `importer` is set for the copy that Nsight Compute carries."""

    program: Path
    importer: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """For making and exporting reports: the importer looks for its libraries in LD_LIBRARY_PATH only.

        Not for profiling: the profiled program would find Nsight's copies of common libraries before its own.
        """
        if self.importer is None:
            return dict(os.environ)
        paths = [str(self.importer.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


def find_nsys() -> Nsys | None:
    """nsys on PATH, else the newest one inside a Nsight Compute installation, else None."""
    if program := shutil.which("nsys"):
        return Nsys(Path(program))
    programs = NSIGHT_COMPUTE.glob("*/host/target-linux-x64/nsys")
    for program in sorted(programs, key=lambda path: [*map(int, re.findall(r"\d+", path.parts[-4]))])[-1:]:
        importers = program.parents[1].glob("linux-desktop-*/QdstrmImporter")
        return Nsys(program, next(importers, None))
    return None


def why_no_nsys() -> str:
    """Why nsys cannot profile here, and what would help; empty if it can."""
    nsys = find_nsys()
    if nsys is None:
        return "nsys is neither on PATH nor inside a Nsight Compute; install Nsight Systems"
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libdw.so.1')"]  # Nsight Compute has none
    if nsys.importer and subprocess.run(load, env=nsys.environment, capture_output=True).returncode:
        return (
            "the nsys inside Nsight Compute cannot make reports without libdw.so.1; install libdw1 with all "
            "that it needs, or name the folders that hold it in LD_LIBRARY_PATH"
        )
    return ""


def record(command: list[str], stem: Path) -> Path:
    """Run `command` under nsys and export what happened between its cudaProfilerStart and cudaProfilerStop.

    Writes <stem>.nsys-rep, for the Nsight Systems viewer, and <stem>.sqlite, for `read_export`: its path.

    Raises:
        ProfileError: there is no nsys that can, the command failed, or nsys could not make a report of it.
    """
    if reason := why_no_nsys():
        raise ProfileError(f"{reason}, or take torch.profiler as the source")
    nsys = find_nsys()
    stem = stem.absolute()
    stem.parent.mkdir(parents=True, exist_ok=True)
    raw, report, export = (stem.with_name(stem.name + end) for end in (".qdstrm", ".nsys-rep", ".sqlite"))
    for old in (raw, report, export):
        old.unlink(missing_ok=True)
    # No CPU sampling, no context switches: they make the stream gigabytes large, and nothing here reads them.
    options = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
    options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", f"--output={stem}"]
    log = _run([nsys.program, "profile", *options, *command], dict(os.environ))
    if failure := _python_error(log):
        raise ProfileError(f"{' '.join(command)!r} failed under nsys: {failure}")
    if not report.exists() and nsys.importer:
        # Beside the report that it could not make, or where it says that it left it.
        streams = [raw, *map(Path, re.findall(r"/\S+\.qdstrm\b", log))]
        for stream in [stream for stream in streams if stream.exists()][:1]:
            log += _run([nsys.importer, "-i", stream, "-o", report], nsys.environment)
    if not report.exists():
        raise ProfileError(f"nsys made no report of {' '.join(command)!r}; its last words: {log[-400:]}")
    to_sqlite = ["--type=sqlite", "--force-overwrite=true", f"--output={export}", report]
    log = _run([nsys.program, "export", *to_sqlite], nsys.environment)
    if not export.exists():
        raise ProfileError(f"nsys could not export {report.name}; its last words: {log[-400:]}")
    raw.unlink(missing_ok=True)
    return export


# What ran on the GPU, by the end of its table's name: its name, in SQL.
_NAMES = {
    "KERNEL": "(SELECT value FROM StringIds WHERE id = a.demangledName)",
    "MEMCPY": "'Memcpy ' || CASE a.copyKind WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' WHEN 8 THEN 'DtoD' "
    "WHEN 10 THEN 'PtoP' ELSE 'other' END",
    "MEMSET": "'Memset'",
}


def read_export(path: Path) -> Profile:
    """Read a SQLite export of Nsight Systems 2021.2 or newer.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: it is no export, is cut off, is of too old a schema, or has no kernels or no NVTX
            ranges.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no Nsight Systems export {path}; make one with nsys.record")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as export:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = {table for (table,) in export.execute(query)}
            gpus = export.execute("SELECT DISTINCT name FROM TARGET_INFO_GPU ORDER BY name").fetchall()
            # What did not happen has no table.
            kernels = [_launches(export, kind) for kind in _NAMES if f"CUPTI_ACTIVITY_KIND_{kind}" in tables]
            return Profile(
                source="nsys",
                machine=", ".join(name for (name,) in gpus),
                ranges=_ranges(export) if "NVTX_EVENTS" in tables else pd.DataFrame(),
                kernels=pd.concat(kernels, ignore_index=True) if kernels else pd.DataFrame(),
                calls=_calls(export) if kernels else pd.DataFrame(),
            )
    except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
        raise ProfileError(
            f"{path.name} is damaged or no SQLite export of Nsight Systems 2021.2 or newer ({error}); export "
            f"the report again: nsys export --type=sqlite {path.stem}.nsys-rep"
        ) from None


def _launches(export: sqlite3.Connection, kind: str) -> pd.DataFrame:
    """Kernels, copies or fills, each with the call that launched it: same correlation id, same process."""
    grid = "a.gridX || ',' || a.gridY || ',' || a.gridZ" if kind == "KERNEL" else "''"
    return pd.read_sql_query(
        f"""SELECT {_NAMES[kind]} AS name, '{kind.lower()}' AS kind, a.globalPid AS process,
                   r.globalTid AS thread, coalesce(r.start, a.start) AS launch_ns, a.start AS start_ns,
                   a.end AS end_ns, {grid} AS grid, a.streamId AS stream
            FROM CUPTI_ACTIVITY_KIND_{kind} a LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r
              ON r.correlationId = a.correlationId AND (r.globalTid >> 24) = (a.globalPid >> 24)""",
        export,
    )


def _calls(export: sqlite3.Connection) -> pd.DataFrame:
    """Calls of the CUDA API, on all threads; without the version that each name ends in."""
    calls = pd.read_sql_query(
        """SELECT (globalTid >> 24) << 24 AS process, globalTid AS thread,
                  (SELECT value FROM StringIds WHERE id = nameId) AS name, start AS start_ns, end AS end_ns
           FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY start""",
        export,
    )
    return calls.assign(name=calls.name.str.replace(r"_v\d+$", "", regex=True))


def _ranges(export: sqlite3.Connection) -> pd.DataFrame:
    """Ranges (push-pop and start-end) of the default domain; libraries annotate themselves in their own."""
    return pd.read_sql_query(
        """SELECT (globalTid >> 24) << 24 AS process, globalTid AS thread,
                   coalesce(text, (SELECT value FROM StringIds WHERE id = textId)) AS name,
                   start AS start_ns,
                   coalesce(end, (SELECT max(end) FROM CUPTI_ACTIVITY_KIND_RUNTIME)) AS end_ns
            FROM NVTX_EVENTS
            WHERE eventType IN (59, 60) AND coalesce(domainId, 0) = 0 AND start IS NOT NULL
            ORDER BY start""",
        export,
    )


def _run(command: list, environment: dict[str, str]) -> str:
    """Run to the end, whatever the exit code (files tell whether it worked), and return what it printed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    return (done.stdout + done.stderr).replace("\r", "\n")


def _python_error(log: str) -> str:
    """The last line of a traceback that the profiled program printed; nsys reports on what ran until then."""
    _, traceback, said = log.rpartition("Traceback (most recent call last)")
    errors = re.findall(r"^[\w.]*\w(?:Error|Exception|Interrupt)(?::.*)?$", said, re.MULTILINE)
    return (errors or ["it ended with a traceback"])[0] if traceback else ""
