"""Runs: one execution of what measures is one file, `figures/<machine>/runs/<run>.json`; its rows name it.

It says where, when, with which versions, settings and parameters, and with which code (`labbook.code`) its
rows were measured, and it is written before them. Nothing in it names a host, a user or a path.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from labbook.files import figures_dir, find, read_record, write_record
from labbook.machine import gpu_of, now, versions
from labbook.project import project

_UNKNOWN = {"code that is not on record": ""}  # of rows saved by hand, or whose run is gone
# What changes times or results, besides switches.
_SETTINGS = re.compile("NCCL_|CUDA_|CUBLAS|PYTORCH_|TORCH|TRITON_")


@dataclass
class Record:
    """What the file of a run says. `code`: hashes by file or cell."""

    run: str
    slug: str
    machine: str
    gpu: str
    torch: str
    triton: str
    python: str = ""
    cuda: str = ""
    nccl: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    commit: str = "unknown"
    measured_at: list[str] = field(default_factory=list)  # first, last
    parameters: dict = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """The run that this process measures in.

    slug, machine: of the problem, of this machine. parameters: of the notebook.
    executed: gives the code behind what is being measured, as `code.of_cells` does; called at each write;
        by default there is none, as a call of `dict` has it.
    """

    slug: str
    machine: str
    parameters: Mapping = field(default_factory=dict)
    executed: Callable = dict

    def __post_init__(self) -> None:
        self.name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{self.slug}-{secrets.token_hex(2)}"

    def write(self) -> None:
        """Write the file of the run, or bring it up to date: its code and the time of its last rows."""
        self.record.measured_at = self.record.measured_at[:1] + [now()]
        hashes = self.record.code | self.executed()
        self.record.code = dict(sorted(hashes.items()))
        write_record(figures_dir() / self.machine / "runs" / f"{self.name}.json", self.record)

    @cached_property
    def record(self) -> Record:
        """Described when the first rows are saved; what does not change during a run."""
        record = Record(
            run=self.name,
            slug=self.slug,
            machine=self.machine,
            gpu=gpu_of(self.machine),
            measured_at=[now()],
            **versions(),
        )
        record.settings = _settings()
        record.commit = git_commit(project().root)
        record.parameters = {
            name: value for name, value in self.parameters.items() if os.sep not in str(value)
        }
        if record.gpu != "none" and torch.cuda.is_available():
            record.cuda = torch.version.cuda or ""
            if dist.is_nccl_available():
                record.nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return record


def _settings():
    """Of the environment what changes results, without paths, and torch's switches."""
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if _SETTINGS.match(name) and os.sep not in value
    }
    settings["deterministic"] = str(torch.are_deterministic_algorithms_enabled())
    settings["float32 matmuls"] = torch.get_float32_matmul_precision()
    return settings


def load_run(machine: str, name: str) -> Record:
    """What is known of a run, which may be nothing. Raises ValueError: its file is damaged."""
    path = find(machine, "runs", f"{name}.json")
    record = Record(name, "", machine, "", "", "")  # nothing else is known of it
    if path.exists():
        record = read_record(path, Record)
    record.code = record.code or _UNKNOWN
    return record


def remove_unused(machine_slug: str, names: Iterable[str]) -> None:
    """Remove the files of runs that have no row left. The caller holds the machine's lock."""
    folder = figures_dir() / machine_slug
    for name in names:
        has_row = any(name.encode() in table.read_bytes() for table in folder.glob("*/*.csv"))
        # A name that a damaged file has may be a path.
        if Path(name).name == name and not has_row:
            (folder / "runs" / f"{name}.json").unlink(missing_ok=True)


@cache
def git_commit(repository: Path) -> str:
    """What git says of the library when this process first saves, or "unknown"; + for uncommitted changes.

    Of a repository around the project it says nothing.
    """
    if not (repository / ".git").exists():
        return "unknown"
    try:
        commit = _git(repository, "rev-parse", "--short=10", "HEAD")
        changes = _git(repository, "status", "--porcelain", "--", "lib")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}+" if changes else commit


def _git(repository, *arguments):
    # A git hook names its own repository there.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    completed = subprocess.run(
        ("git", "-C", str(repository)) + arguments,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return completed.stdout.strip()
