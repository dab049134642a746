"""Carrying out a batch: one process a notebook, a record of each on disk, a summary."""

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock
import nbformat
import tqdm

from labbook import code
from labbook.book.batch import Job
from labbook.book.execute import Outcome, execute
from labbook.book.notebooks import is_last, read_parameters, why_not_here
from labbook.files import make_folder, write_atomically

Record = dict[str, Any]  # how a job ended, as kept beside its executed notebook: an Outcome, and these
_KEYS = {"notebook", "parameters", "code", *Outcome.__dataclass_fields__}


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
    if record["status"] != "ok":
        return f"it ended with status {record['status']}"
    if is_last(job.notebook.stem):
        return "it shows what the others found"
    before, now = record["code"], _code(job)
    return code.why(dict.fromkeys(now, "") | before, now) or None


def _run_job(job: Job, folder: Path) -> Record:
    output, found = folder / f"{job.name}.ipynb", _code(job)
    if reason := why_not_here(job.notebook.stem):
        record = asdict(Outcome("skipped", reason))
    else:
        record = asdict(execute(job.notebook, output, job.parameters))
    record |= {"notebook": job.notebook.stem, "parameters": job.line(), "code": found}
    write_atomically(folder / f"{job.name}.json", json.dumps(record, indent=2) + "\n")
    return record


def load_records(folder: Path) -> dict[str, Record]:
    """How the jobs of a folder ended, by the names of their files."""
    return {path.stem: record for path in sorted(folder.glob("*.json")) if (record := load_record(path))}


def load_record(path: Path) -> Record | None:
    """The record in a file; None when it is not there or damaged, and its job runs again."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.keys() == _KEYS else None


def _code(job: Job) -> dict[str, str]:
    """What the outcome of a job depends on, by name: parameters, torch, and the code behind what it saves."""
    known = read_parameters(nbformat.read(job.notebook, as_version=4))
    values = {name: parameter.default for name, parameter in known.items()} | job.parameters
    found = {f"parameter {name}": json.dumps(value) for name, value in values.items()}
    return found | {"torch": importlib.metadata.version("torch")} | code.of_notebook(job.notebook)


def summary(records: Sequence[Record]) -> str:
    """How each ended and how long it took, those last that failed; a reason under its line."""
    lines = []
    for record in sorted(records, key=lambda record: record["status"] == "error"):
        lines.append("{status:7} {seconds:7.1f} s  {notebook} {parameters}".format(**record).rstrip())
        lines += [f"    {record['reason']}"] * bool(record["reason"])
    return "\n".join(lines)
