"""Runs: one execution of what measures is one file, `figures/<machine>/runs/<run>.json`; its rows name it.

It says where, when, with which versions, settings and parameters, and with which code (`labbook.code`) its
rows were measured, and it is written before them. Nothing in it names a host, a user or a path.
"""

import os
import secrets
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from labbook import code
from labbook import machine as here
from labbook.files import PROJECT, figures_dir, find, read_record, write_record

# What changes times or results, besides switches.
_SETTINGS = ("NCCL_", "CUDA_", "CUBLAS", "PYTORCH_", "TORCH", "TRITON_")


@dataclass
class Record:
    """What the file of a run says. `code`: hashes by file or cell; none where they were not recorded."""

    run: str
    slug: str
    machine: str
    gpu: str
    torch: str
    triton: str
    python: str = ""
    cuda: str = ""
    nccl: str = ""
    gpu_state: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    commit: str = "unknown"
    measured_at: list[str] = field(default_factory=list)  # first, last
    parameters: dict[str, Any] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    kernels: str = ""  # of a run from before code was recorded: a digest of attention's kernels
    historical: str = ""  # why its rows cannot be measured again with this repository


@dataclass
class Run:
    """The run that this process measures in.

    slug, machine: of the problem, of this machine. parameters: of the notebook.
    executed: gives the code behind what is being measured, as `code.of_cells` does; called at each write.
    """

    slug: str
    machine: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    executed: Callable[[], dict[str, str]] = dict

    def __post_init__(self) -> None:
        self.name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{self.slug}-{secrets.token_hex(2)}"

    def write(self) -> None:
        """Write the file of the run, or bring it up to date: its code and the time of its last rows."""
        self.record.measured_at[1:] = [here.now()]
        self.record.code = dict(sorted((self.record.code | self.executed()).items()))
        write_record(figures_dir() / self.machine / "runs" / f"{self.name}.json", self.record)

    @cached_property
    def record(self) -> Record:
        """Described when the first rows are saved; what does not change during a run."""
        gpu = here.gpu_of(self.machine)
        about = {"slug": self.slug, "machine": self.machine, "gpu": gpu, **here.versions()}
        given = {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)
        }
        settings = {name: value for name, value in given.items() if os.sep not in value}  # no paths
        settings["deterministic"] = str(torch.are_deterministic_algorithms_enabled())
        settings["float32 matmuls"] = torch.get_float32_matmul_precision()
        about |= {
            "settings": settings,
            "measured_at": [here.now()],
            "parameters": dict(self.parameters),
        }
        about |= {"commit": os.environ.get("LABBOOK_COMMIT") or git_commit(PROJECT)}
        if gpu != "none" and torch.cuda.is_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
            about |= {"cuda": torch.version.cuda or "", "nccl": nccl, "gpu_state": here.gpu_state()}
        return Record(self.name, **about)


def load_run(machine: str, name: str) -> Record | None:
    """What is known of a run; None where its file is not there. Raises ValueError: the file is damaged."""
    path = find(machine, "runs", f"{name}.json")
    return read_record(path, Record) if name and path.exists() else None


def why_old(record: Record | None, now: Mapping[str, str]) -> str:
    """Why the rows of a run are not of today's code; "" if they are. now: from `code.of_notebook`."""
    if record is None:
        return "of a run that is not known"
    if record.historical:
        return f"historical, {record.historical}"
    if not record.code:
        return "from before code was recorded"
    return f"older: {reason}" if (reason := code.why(record.code, now)) else ""


def of_code(now: Mapping[str, str], rows: pd.DataFrame, machine: str) -> pd.DataFrame:
    """The rows of a machine that all of this code measured, with this torch: not to be repeated."""
    records = (load_run(machine, name) for name in rows["run"].dropna().unique())
    known = (each for each in records if now and each and each.torch == torch.__version__)
    return rows[rows["run"].isin([each.run for each in known if not code.changed(now, each.code)])]


def remove_unused(machine: str, names: Iterable[str]) -> None:
    """Remove the files of runs that have no row left. The caller holds the machine's lock."""
    for name in names:
        tables = (figures_dir() / machine).glob("*/*.csv")
        if Path(name).name == name and not any(
            name.encode() in table.read_bytes() for table in tables
        ):
            (figures_dir() / machine / "runs" / f"{name}.json").unlink(missing_ok=True)


@cache
def git_commit(repository: Path) -> str:
    """What git says of the library when this process first saves, or "unknown"; + for uncommitted changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(
            git("status", "--porcelain", "--", "lib")
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
