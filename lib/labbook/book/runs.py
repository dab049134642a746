"""Carrying out a batch: one process a notebook, a record of each on disk, a summary.

A process that executes a notebook, this module as a program, leaves nothing behind however it ends.
"""

import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
import nbformat
import psutil
import tqdm

from labbook import code
from labbook.book.batch import Job
from labbook.book.notebooks import is_last, read_parameters, why_not_here
from labbook.files import make_folder, read_record, write_record

# A kernel ends when it has tidied up: to take torch down, module by module, lasts seconds more.
_AT_EXIT = '__import__("atexit").register(__import__("os")._exit, 0);'


@dataclass(frozen=True)
class Record:
    """How a job ended, as kept beside its executed notebook.

    status: "ok", "error" or "skipped"; then `reason` says why. code: what that depends on, by name.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
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
                why, record = why_again(job, folder), load_record(folder / f"{job.name}.json")
                if force or why is not None:
                    if record and not force:
                        bar.write(f"again: {job.notebook.stem} {job.line()}: {why}")
                    record = _run_job(job, folder)
                    bar.write(summary([record]))
            records.append(record)
    return records


def why_again(job: Job, folder: Path) -> str | None:
    """Why a job has to run; None when it is done, as a record in the folder says."""
    record = load_record(folder / f"{job.name}.json")
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
    record = Record("skipped", reason) if reason else execute(job.notebook, output, job.parameters)
    record = replace(record, notebook=job.notebook.stem, parameters=job.line(), code=found)
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


def execute(source: Path, output: Path, parameters: dict[str, Any]) -> Record:
    """Execute a notebook with this Python; `output` is replaced when it has ended, well or with an error.

    Its folder is the kernel's working directory. Ctrl-C ends everything that was started here.
    """
    partial = output.with_name(f".{output.name}")  # left by a kill, replaced by the next run
    started = time.perf_counter()
    what = json.dumps([str(source), str(partial), parameters])
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, what], start_new_session=True,  # Ctrl-C is for this process
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        reason = process.communicate()[0]
    except BaseException:
        _kill_tree(process.pid)
        partial.unlink(missing_ok=True)
        raise
    if (code := process.returncode) < 0:  # it could not say why
        reason = f"killed by {signal.Signals(-code).name}, perhaps out of memory"
    elif code:
        reason = f"exit code {code}"
    if partial.exists():
        os.replace(partial, output)
    return Record("error" if reason else "ok", reason, round(time.perf_counter() - started, 1))


def _kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, itself last: it may be the one that calls."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _main(source: str, output: str, parameters: dict[str, Any]) -> None:
    """The process: print why papermill failed, in one line, or nothing. It ends when its parent does."""
    parent = psutil.Process().parent()
    threading.Thread(target=lambda: (parent.wait(), _kill_tree(os.getpid())), daemon=True).start()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels say outside of their cells goes nowhere
    os.environ.pop("JUPYTER_PATH", None)  # the kernel "python3" is this Python's, whatever the user has
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    import papermill
    from papermill.exceptions import PapermillExecutionError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        papermill.execute_notebook(
            source, output, parameters, cwd=Path(source).parent, progress_bar=False, kernel_name="python3",
            language="python", extra_arguments=[f"--IPKernelApp.exec_lines={_AT_EXIT}"],
        )  # fmt: skip
    except PapermillExecutionError as error:
        said.write(f"cell [{error.exec_count}]: {' '.join(f'{error.ename}: {error.evalue}'.split())}")
    except Exception as error:  # DeadKernelError: Kernel died, and others
        said.write(" ".join(f"{type(error).__name__}: {error}".split()))
    said.close()


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
