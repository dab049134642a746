"""Carrying out a batch: one process a notebook, a record of each on disk, a summary."""

import importlib.metadata
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path

import filelock
import nbformat
import tqdm

from labbook import code
from labbook.book.batch import Job
from labbook.book.execute import Outcome, execute
from labbook.book.notebooks import is_last, read_parameters, why_not_here
from labbook.files import make_folder, read_record, write_record


@dataclass(frozen=True)
class Record(Outcome):
    """How a job ended, as kept beside its executed notebook. code: what that depends on, by name."""

    notebook: str = ""
    parameters: str = ""
    code: dict[str, str] = field(default_factory=dict)


def run_batch(jobs: Sequence[Job], folder: Path, *, force: bool = False) -> list[Record]:
    """Execute jobs, leaving out what is done and unchanged; a failing notebook does not stop the others.

    Each ends as `<name>.ipynb` and `.json` in the folder, so that a killed run continues where it was. Of two
    runs at once one waits for what the other executes. `force` executes also what is done.

    Raises:
        PermissionError: the folder cannot be written to.
        KeyboardInterrupt: Ctrl-C; what was running has ended.
    """
    make_folder(folder, "name one that can: --output FOLDER")
    records = []
    with tqdm.tqdm(jobs, unit="notebook", disable=None) as bar:
        for job in bar:
            bar.set_postfix_str(job.name)
            with filelock.FileLock(folder / f".{job.name}.lock"):
                record = load_record(folder / f"{job.name}.json")
                if force or (why := why_again(job, record, folder)) is not None:
                    if record and not force:
                        bar.write(f"again: {job.notebook.stem} {job.line()}: {why}")
                    record = _run_job(job, folder)
                    bar.write(summary([record]))
            records.append(record)
    return records


def why_again(job: Job, record: Record | None, folder: Path) -> str | None:
    """Why a job has to run, given the record of the last time; None when it is done."""
    if record is None or not (folder / f"{job.name}.ipynb").exists():
        return "its notebook is gone"
    if record.status != "ok":
        return f"it ended with status {record.status}"
    if is_last(job.notebook.stem):
        return "it shows what the others found"
    now = _code(job)
    return code.why(dict.fromkeys(now, "") | record.code, now) or None


def _run_job(job: Job, folder: Path) -> Record:
    found, reason = _code(job), why_not_here(job.notebook.stem)  # before: what changes meanwhile did not run
    output = folder / f"{job.name}.ipynb"
    outcome = Outcome("skipped", reason) if reason else execute(job.notebook, output, job.parameters)
    record = Record(*astuple(outcome), job.notebook.stem, job.line(), found)
    write_record(output.with_suffix(".json"), record)
    return record


def load_records(folder: Path) -> dict[str, Record]:
    """How the jobs of a folder ended, by the names of their files."""
    return {path.stem: record for path in sorted(folder.glob("*.json")) if (record := load_record(path))}


def load_record(path: Path) -> Record | None:
    """The record in a file; None when it is not there or damaged, and its job runs again."""
    with suppress(OSError, ValueError):
        return read_record(path, Record)


def _code(job: Job) -> dict[str, str]:
    """What the outcome of a job depends on, by name: parameters, torch, and the code behind what it saves."""
    known = read_parameters(nbformat.read(job.notebook, as_version=4))
    values = {name: parameter.default for name, parameter in known.items()} | job.parameters
    found = {f"parameter {name}": json.dumps(value) for name, value in values.items()}
    return found | {"torch": importlib.metadata.version("torch")} | code.of_notebook(job.notebook)


def summary(records: Sequence[Record]) -> str:
    """How each ended and how long it took, those last that failed; a reason under its line."""
    lines = []
    for each in sorted(records, key=lambda record: record.status == "error"):
        lines.append(f"{each.status:7} {each.seconds:7.1f} s  {each.notebook} {each.parameters}".rstrip())
        lines += [f"    {each.reason}"] * bool(each.reason)
    return "\n".join(lines)
