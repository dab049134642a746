"""A batch: what `notebooks/batch.yaml` asks of this machine, checked before anything runs, and carried out.

Each job, a notebook with parameters, leaves its executed notebook and its outcome on disk.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from multiprocessing.pool import ThreadPool
from pathlib import Path
from textwrap import shorten

import filelock
import numpy as np
import tqdm
import yaml

from labbook import code
from labbook.bench import grid
from labbook.book import notebooks
from labbook.book.execution import Outcome, execute
from labbook.book.notebooks import BatchError, convert, parameter_errors, resolve, unknown
from labbook.files import figures_dir, make_folder, read_record, write_record
from labbook.machine import versions
from labbook.project import project, read_yaml
from labbook.rows import RowError, run_counts
from labbook.runs import Record

PROFILES = {"cpu": 0, "gpu": 1, "multi-gpu": 2, "four-gpus": 4}  # with the GPUs that each needs
_DEFAULTS = {"parameters": {}, "grid": {}}  # of an entry
_START_S = 30  # of a kernel, its imports, its steps and answers, on a machine of H200s


@dataclass(frozen=True)
class Job:
    """One notebook with one set of parameters."""

    notebook: Path
    parameters: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its files: the notebook, parameters to read, and a digest of all of them to tell apart."""
        if not self.parameters:
            return self.notebook.stem
        values = self.parameters.values()
        short = [str(value)[:16] for value in values if isinstance(value, str | int | float)]
        digest = hashlib.sha256(json.dumps(self.parameters, sort_keys=True).encode()).hexdigest()
        words = [self.notebook.stem] + short[:4] + [digest[:6]]
        return re.sub(r"[^\w.-]+", "_", "-".join(words))

    def line(self) -> str:
        """The parameters as one would give them."""
        return " ".join(
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in self.parameters.items()
        )


def jobs(profile: str, *, only: Sequence[str] = (), overrides: Sequence[str] = ()) -> list[Job]:
    """The jobs of a profile, everything about them checked.

    profile: one of PROFILES.
    only: the notebooks to keep, as `resolve` takes them; what the profile lacks runs with defaults, and
        so does each of them where there are overrides.
    overrides: "name=value", for every notebook that has the parameter.
    Raises BatchError: the first unknown notebook or override, or else a line for each wrong parameter of the
        batch; they name what is allowed. ValueError: batch.yaml or parameters.yaml cannot be read.
    """
    by_notebook = notebooks.load_notebooks()
    entries = _chosen(profile, only, overrides, by_notebook)
    overriding = dict(override.partition("=")[::2] for override in overrides)  # without the sign
    settable = {parameter for name, _ in entries for parameter in by_notebook[name]}
    for name in overriding.keys() - settable:
        raise BatchError(f"-p {name}: {unknown('parameter', name, sorted(settable))}")
    by_name = {}  # an entry may be there twice
    errors = []
    for name, texts in entries:
        parameters = by_notebook[name]
        texts |= {key: text for key, text in overriding.items() if key in parameters}
        values = {
            key: convert(parameters[key].default, text) if key in parameters else text
            for key, text in texts.items()
        }
        job = Job(notebooks.folder() / f"{name}.ipynb", values)
        by_name[job.name] = job
        errors += [f"{name}: {error}" for error in parameter_errors(parameters, values, name[3:])]
    if errors:
        raise BatchError("\n".join(dict.fromkeys(errors)))
    return list(by_name.values())


def _chosen(profile, only, overrides, names):
    """The entries of a profile, or of some notebooks alone; of one that has none, one with its defaults."""
    # Numbers as text, to be read as those of the command line are.
    profiles = read_yaml(notebooks.folder() / "batch.yaml", yaml.BaseLoader)
    entries = list(_entries(profile, profiles, names))
    if only:
        chosen = resolve(only, names)
        # Who names parameters, too, asks for one run of each.
        entries = [] if overrides else [entry for entry in entries if entry[0] in chosen]
        entries += [(name, {}) for name in chosen if name not in dict(entries)]
    return entries


def _entries(profile, profiles, names):
    """A notebook and parameters as text for each point of each grid of a profile, included ones too."""
    if profile not in profiles:
        raise BatchError(unknown("profile", profile, profiles))
    # Without this one: a profile that includes itself is unknown there.
    others = {name: entries for name, entries in profiles.items() if name != profile}
    for entry in profiles[profile]:
        match _DEFAULTS | entry if isinstance(entry, dict) else entry:
            case {"profile": str(other)}:
                yield from _entries(other, others, names)
            case {"notebook": str(name), "parameters": dict(texts), "grid": dict(axes), **more} if (
                not more and all(axes.values())
            ):
                (notebook,) = resolve([name], names)
                for point in grid(**axes):  # one empty point without a grid
                    yield notebook, texts | point
            case _:
                raise BatchError(
                    f"batch.yaml, {profile}: {entry!r}; allowed: notebook with parameters (a value each) and "
                    "grid (a list each), or profile"
                )


def estimated_s(job: Job, at_once: int) -> float:
    """Seconds that a job may take, by its runs here, or else, if it has parameters, on the reference.

    They are those between the first rows of a run and its last, and `_START_S` for the rest of the page, in
    which some overlap; NaN where neither ran it.
    """
    pattern = f"runs/*-{job.notebook.stem[3:]}-*.json"
    # What a GPU takes for another machine's defaults says nothing here.
    others = project().figures.glob(f"{project().reference}*/{pattern}") if job.parameters else []
    here = [
        path
        for path in figures_dir().glob(f"*/{pattern}")
        if path.parts[-3] not in project().committed
    ]
    seconds = Counter()
    for path in sorted(others) + sorted(here):
        record = read_record(path, Record)
        if job.parameters.items() <= record.parameters.items():
            first, last = map(datetime.fromisoformat, record.measured_at)
            # A job that was resumed has several runs, each with rows on record.
            like = record.machine, str(record.parameters)
            seconds[like] += (last - first).total_seconds()
    # The last are from here, if any are.
    return seconds[like] + _START_S / at_once if seconds else np.nan


def run_batch(
    jobs: Sequence[Job], folder: Path, *, force: bool = False, at_once: int = 1
) -> list[Outcome]:
    """Execute jobs, leaving out what is done and unchanged; a failing notebook does not stop the others.

    Each ends as `<name>.ipynb` and `.json` in the folder, so that a killed run continues where it was. Of two
    runs at once one waits for what the other executes. `force` executes also what is done.
    at_once: how many notebooks; their cells wait for each other where they measure, as book/kernel.py says.
    Raises PermissionError: the folder cannot be written to.
    Raises KeyboardInterrupt: Ctrl-C; what was running ends with this process.
    """
    make_folder(folder, "name one that can: --output FOLDER")
    os.environ["LABBOOK_LOCK"] = str(folder / ".measuring")  # of the kernels
    seconds = {job.name: estimated_s(job, at_once) for job in jobs}
    outcomes = []
    with tqdm.tqdm(total=len(jobs), unit="notebook", disable=None) as bar:

        def finish(job):
            left_s = np.nansum(list(seconds.values()))
            bar.set_postfix_str(f"about {left_s:.0f} s left, {job.name}")
            outcome = _finish(job, folder, force, bar.write)
            del seconds[job.name]
            bar.update()
            return outcome

        for together in in_turn(jobs):
            with ThreadPool(at_once) as pool:  # Ctrl-C does not wait for its threads
                outcomes += pool.map(finish, together, chunksize=1)
    return outcomes


def in_turn(jobs: Sequence[Job]) -> list[list]:
    """Jobs that may run at once, and those after them that show what the others found."""
    return [
        [job for job in jobs if notebooks.is_last(job.notebook.stem) == comes_last]
        for comes_last in (False, True)
    ]


def _finish(job, folder, force, write):
    """How a job ended, executed where it has to be; `write` takes what there is to say of it."""
    with filelock.FileLock(folder / f".{job.name}.lock"):
        outcome = load_outcome(folder / f"{job.name}.json")
        if not force:
            reason = reason_to_run(job, folder)
            if not reason:
                return outcome
            if outcome:
                write(f"again: {job.notebook.stem} {job.line()}: {reason}")
        outcome = _execute(job, folder)
        write(summary([outcome]))
        return outcome


def _execute(job, folder):
    """Execute a job and keep how it ended."""
    name = job.notebook.stem
    code_before = _code(job)  # while it is executed it may change
    if reason := notebooks.why_not_here(name):
        outcome = Outcome("skipped", reason)
    else:
        outcome = execute(job.notebook, folder / f"{job.name}.ipynb", job.parameters)
    outcome = replace(
        outcome,
        notebook=name,
        parameters=job.line(),
        code=code_before,
        rows=_row_count(job, folder),
    )
    write_record(folder / f"{job.name}.json", outcome)
    return outcome


def reason_to_run(job: Job, folder: Path) -> str:
    """Why a job has to run; empty when it is done, as its outcome in the folder says."""
    outcome = load_outcome(folder / f"{job.name}.json")
    if outcome is None or not (folder / f"{job.name}.ipynb").exists():
        return "its notebook is gone"
    if outcome.status != "ok":
        return f"it ended with status {outcome.status}"
    if notebooks.is_last(job.notebook.stem):
        return "it shows what the others found"
    if _row_count(job, folder) < outcome.rows:
        return "rows of it are gone"
    now = _code(job)
    # What there was nothing of then has changed, too.
    names = ", ".join(code.changed(dict.fromkeys(now, "") | outcome.code, now))
    return f"{shorten(names, 80, placeholder=' ...')} changed since" if names else ""


def load_outcome(path: Path) -> Outcome | None:
    """The outcome in a file; None when it is not there or damaged, and its job runs again."""
    with suppress(OSError, ValueError):
        return read_record(path, Outcome)


def _row_count(job, folder):
    """How many rows of the notebook there are on the machine that the folder is named after.

    Of the rows of several GPUs, which are in h200-x2, it counts none.
    """
    with suppress(RowError):  # of a damaged table: executed again, the notebook says it
        return run_counts(job.notebook.stem[3:], folder.name).total()
    return 0


def _code(job):
    """What the outcome of a job depends on, by name: parameters, versions, the code behind its rows."""
    parameters = notebooks.read_parameters(notebooks.read(job.notebook))
    values = {name: parameter.default for name, parameter in parameters.items()} | job.parameters
    texts = {f"parameter {name}": json.dumps(value) for name, value in values.items()}
    return texts | versions() | code.of_notebook(job.notebook)


def summary(outcomes: Sequence[Outcome]) -> str:
    """How each ended and how long it took, those last that failed; a reason under its line."""
    lines = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.status == "error"):
        line = (
            f"{outcome.status:7} {outcome.seconds:7.1f} s  {outcome.notebook} {outcome.parameters}"
        )
        lines.append(line.rstrip())
        if outcome.reason:
            lines.append(f"    {outcome.reason}")
    return "\n".join(lines)
