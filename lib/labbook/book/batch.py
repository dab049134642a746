"""A batch: what `notebooks/batch.yaml` asks of this machine, checked before anything runs, and carried out.

Each job, a notebook with parameters, has a process of its own, this module as a program, which leaves nothing
behind however it ends, and a record on disk. On a cluster it is a job of Slurm's too, with the GPUs it needs;
partition, account, time limit and the like are Slurm's own variables, SBATCH_PARTITION and so on.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import filelock
import nbformat
import papermill
import psutil
import tqdm
import yaml
from papermill.exceptions import PapermillExecutionError

from labbook import code
from labbook.book import notebooks
from labbook.book.notebooks import (
    BatchError,
    convert,
    load_notebooks,
    parameter_errors,
    resolve,
    unknown,
)
from labbook.files import make_folder, read_record, write_record

PROFILES = {"cpu": 0, "gpu": 1, "multi-gpu": 2}  # with the GPUs that each needs
# A kernel ends when it has tidied up: to take torch down, module by module, lasts seconds more.
_AT_EXIT = '__import__("atexit").register(__import__("os")._exit, 0);'


@dataclass(frozen=True)
class Job:
    """One notebook with one set of parameters."""

    notebook: Path
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its files: the notebook, parameters to read, and a digest of all of them to tell apart."""
        if not self.parameters:
            return self.notebook.stem
        short = [
            str(value) for value in self.parameters.values() if isinstance(value, str | int | float)
        ]
        digest = hashlib.sha256(json.dumps(self.parameters, sort_keys=True).encode()).hexdigest()[
            :6
        ]
        return "-".join(
            re.sub(r"[^\w.-]+", "_", word) for word in [self.notebook.stem, *short[:4], digest]
        )

    def line(self) -> str:
        """The parameters as one would give them."""
        texts = {
            name: v if isinstance(v, str) else json.dumps(v) for name, v in self.parameters.items()
        }
        return " ".join(f"{name}={text}" for name, text in texts.items())


def plan(profile: str, *, only: Sequence[str] = (), overrides: Sequence[str] = ()) -> list[Job]:
    """The jobs of a profile, everything about them checked.

    profile: one of PROFILES.
    only: the notebooks to keep, as `resolve` takes them; what the profile lacks runs with defaults.
    overrides: "name=value", for every notebook that has the parameter; a name given twice is a grid.
    Raises BatchError: a line for each unknown notebook or parameter and wrong value, naming what is allowed.
    """
    known = load_notebooks()
    # Numbers as text, to be read as those of the command line are
    planned = _entries(profile, notebooks.read_yaml("batch.yaml", yaml.BaseLoader))
    entries = [(resolve([name], known)[0], texts) for name, texts in planned]
    if only:
        names, planned = resolve(only, known), {name for name, _ in entries}
        entries = [entry for entry in entries if entry[0] in names]
        entries += [(name, {}) for name in names if name not in planned]
    names = sorted({name for notebook, _ in entries for name in known[notebook]})
    given = defaultdict(list)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or name not in names:
            raise BatchError(f"-p {override}: {unknown('parameter', name, names)}")
        given[name].append(text)
    jobs, errors = {}, {}  # as sets that keep their order
    for name, texts in entries:
        types = {key: parameter.default for key, parameter in known[name].items()}
        for changed in _grid({key: given[key] for key in given if key in known[name]}):
            values = {
                key: convert(types.get(key, ""), text) for key, text in (texts | changed).items()
            }
            job = Job(notebooks.folder() / f"{name}.ipynb", values)
            jobs.setdefault(job.name, job)
            found = parameter_errors(known[name], job.parameters, name.partition("_")[2])
            errors |= dict.fromkeys(f"{name}: {error}" for error in found)
    if errors:
        raise BatchError("\n".join(errors))
    return [*jobs.values()]


def _entries(profile: str, profiles: dict[str, Any]) -> Iterable[tuple]:
    """(notebook, parameters) for each point of each grid of a profile, with the others that it includes."""
    if profile not in profiles:
        raise BatchError(unknown("profile", profile, profiles))
    for entry in profiles[profile] or []:
        match {"parameters": {}, "grid": {}} | entry if isinstance(entry, dict) else entry:
            case {"profile": str(other)} if len(entry) == 1:
                yield from _entries(
                    other, {name: it for name, it in profiles.items() if name != profile}
                )
            case {
                "notebook": str(name),
                "parameters": dict(values),
                "grid": dict(grid),
                **rest,
            } if not rest and all(isinstance(each, list) and each for each in grid.values()):
                yield from ((name, values | point) for point in _grid(grid))
            case _:
                allowed = (
                    "notebook with parameters (a value each) and grid (a list each), or profile"
                )
                raise BatchError(f"batch.yaml, {profile}: {entry!r}; allowed: {allowed}")


def _grid(values: dict[str, list]) -> Iterable[dict[str, Any]]:
    """Every combination, the last name varying fastest; no names give one empty combination."""
    return (dict(zip(values, point, strict=True)) for point in product(*values.values()))


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
    Raises PermissionError: the folder cannot be written to.
    Raises KeyboardInterrupt: Ctrl-C; what was running has ended.
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
                    found, output = (
                        _code(job),
                        folder / f"{job.name}.ipynb",
                    )  # before: it may change
                    skipped = Record("skipped", notebooks.why_not_here(job.notebook.stem))
                    ended = (
                        skipped if skipped.reason else execute(job.notebook, output, job.parameters)
                    )
                    record = replace(
                        ended, notebook=job.notebook.stem, parameters=job.line(), code=found
                    )
                    write_record(output.with_suffix(".json"), record)
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
    if notebooks.is_last(job.notebook.stem):
        return "it shows what the others found"
    now = _code(job)
    return code.reason_changed(dict.fromkeys(now, "") | record.code, now) or None


def load_record(path: Path) -> Record | None:
    """The record in a file; None when it is not there or damaged, and its job runs again."""
    with suppress(OSError, ValueError):
        return read_record(path, Record)


def _code(job: Job) -> dict[str, str]:
    """What the outcome of a job depends on, by name: parameters, torch, and the code behind what it saves."""
    known = notebooks.read_parameters(nbformat.read(job.notebook, as_version=4))
    values = {name: parameter.default for name, parameter in known.items()} | job.parameters
    found = {f"parameter {name}": json.dumps(value) for name, value in values.items()}
    return found | {"torch": importlib.metadata.version("torch")} | code.of_notebook(job.notebook)


def summary(records: Sequence[Record]) -> str:
    """How each ended and how long it took, those last that failed; a reason under its line."""
    lines = []
    for each in sorted(records, key=lambda record: record.status == "error"):
        lines.append(
            f"{each.status:7} {each.seconds:7.1f} s  {each.notebook} {each.parameters}".rstrip()
        )
        lines += [f"    {each.reason}"] * bool(each.reason)
    return "\n".join(lines)


def run_on_slurm(
    jobs: Sequence[Job], command: Sequence[str], output: Path, *, gpu: bool, force: bool = False
) -> list[Record]:
    """Submit what is not done and unchanged, and wait for its end; how each job ended.

    Of a job that still is with Slurm from before one waits for the other.

    command: executes the job whose name is put at its end, with records in a folder of `output`.
    gpu: whether a job gets GPUs: as many as it has ranks, at least one.
    Raises BatchError: there is no Slurm here.
    Raises KeyboardInterrupt: Ctrl-C; all jobs of this folder of results are cancelled.
    """
    if shutil.which("sbatch") is None:
        raise BatchError(
            "there is no sbatch here; --cluster slurm is for a node of a Slurm cluster"
        )
    name = f"workbook-{hashlib.sha256(str(output).encode()).hexdigest()[:8]}"
    due = [
        job for job in jobs if force or all(why_again(job, p.parent) for p in _records(job, output))
    ]
    for path in [path for job in due for path in _records(job, output)]:
        path.unlink()  # so that one that is there is of now
    started: list[subprocess.Popen] = []
    try:
        for last in (False, True):  # it shows what the others found
            together = [job for job in due if notebooks.is_last(job.notebook.stem) == last]
            started = [_submit(job, [*command, job.name], output, gpu, name) for job in together]
            for job, process in zip(together, started, strict=True):
                process.wait()
                print(summary([_slurms_record(job, output)]), flush=True)
    except KeyboardInterrupt:
        subprocess.run(["scancel", f"--name={name}"], capture_output=True)
        for process in started:
            process.terminate()
        raise
    return [_slurms_record(job, output) for job in jobs]


def _submit(
    job: Job, command: Sequence[str], output: Path, gpu: bool, name: str
) -> subprocess.Popen:
    """An sbatch that ends when its job has; what both say goes into the log of the job."""
    ranks = job.parameters.get("world_sizes") or [job.parameters.get("world_size", 1)]
    own = job.parameters.get("backend") == "nccl"  # a GPU for each rank
    asked = [f"--gpus-per-node={max(ranks) if own else 1}"] * gpu
    log = make_folder(output / "slurm") / f"{job.name}.log"
    asked += ["--wait", "--nodes=1", f"--job-name={name}", f"--output={log}", "--open-mode=append"]
    asked += [f"--wrap=exec {shlex.join(command)}"]
    with open(log, "a") as said:
        return subprocess.Popen(["sbatch", *asked], stdout=said, stderr=said)


def _records(job: Job, output: Path) -> list[Path]:
    return [*output.glob(f"*/{job.name}.json")]


def _slurms_record(job: Job, output: Path) -> Record:
    """How a job ended; of one that was refused, or killed before it could say, what Slurm said last."""
    for path in _records(job, output):
        return load_record(path)
    said = (output / "slurm" / f"{job.name}.log").read_text().strip().rpartition("\n")[2]
    return Record("error", f"no record, and Slurm says: {said}", 0.0, job.notebook.stem, job.line())


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
    os.environ.pop(
        "JUPYTER_PATH", None
    )  # the kernel "python3" is this Python's, whatever the user has
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    try:
        papermill.execute_notebook(
            source, output, parameters, cwd=Path(source).parent, progress_bar=False, kernel_name="python3",
            language="python", extra_arguments=[f"--IPKernelApp.exec_lines={_AT_EXIT}"],
        )  # fmt: skip
    except PapermillExecutionError as error:
        said.write(
            f"cell [{error.exec_count}]: {' '.join(f'{error.ename}: {error.evalue}'.split())}"
        )
    except Exception as error:  # DeadKernelError: Kernel died, and others
        said.write(" ".join(f"{type(error).__name__}: {error}".split()))
    said.close()


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
