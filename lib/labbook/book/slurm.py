"""A batch on a Slurm cluster: a job for each entry of the plan.

Partition, account, time limit and the like are Slurm's own variables, SBATCH_PARTITION and so on. A job has
the name of its files and, as its comment, the folder of results: by these the same command knows the jobs
that Slurm still lists, waits for them, and submits what is left. Ctrl-C cancels them.
"""

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from labbook.book import runs
from labbook.book.batch import Job
from labbook.book.execute import Outcome
from labbook.book.notebooks import BatchError, is_last
from labbook.files import make_folder

_LOOK_EVERY_S = 5


def run_batch(
    jobs: Sequence[Job], command: Sequence[str], output: Path, *, gpu: bool, force: bool = False
) -> list[runs.Record]:
    """Submit what is not done and unchanged, and wait until Slurm lists none of it; how each job ended.

    Args:
        command: executes the job whose name is put at its end, with records in a folder of `output`.
        gpu: whether a job gets GPUs: as many as it has ranks, at least one.

    Raises:
        BatchError: there is no Slurm here, or it does not answer.
        KeyboardInterrupt: Ctrl-C; every job is cancelled, and none is left.
    """
    make_folder(output / "slurm")
    names = {job.name for job in jobs}
    numbers = {name: number for name, number in _listed(output).items() if name in names}
    refused: dict[str, str] = {}
    try:
        for job in sorted(jobs, key=lambda job: is_last(job.notebook.stem)):
            if job.name in numbers or not (force or _is_due(job, output)):
                continue
            for record in output.glob(f"*/{job.name}.json"):
                record.unlink()  # so that one that is there is this job's
            after = [*numbers.values()] if is_last(job.notebook.stem) else []  # it shows the others' results
            gpus = _gpus(job) if gpu else 0
            done = _submit(job, command, output, gpus, after)
            if done.returncode:
                refused[job.name] = f"Slurm refused a job with {gpus} GPUs: {_last(done.stderr)}"
            else:
                numbers[job.name] = done.stdout.strip().partition(";")[0]
        left = None
        while (now := len(names & _listed(output).keys())) > 0:
            if now != left:
                print(f"{now} of {len(numbers)} jobs wait or run", flush=True)
            left = now
            time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        mine = [number for name, number in _listed(output).items() if name in names]
        subprocess.run(["scancel", *mine], capture_output=True)
        raise
    return [_record(job, numbers.get(job.name, ""), refused.get(job.name, ""), output) for job in jobs]


def _gpus(job: Job) -> int:
    """How many GPUs an entry needs: one for each of its ranks, if they are to have their own."""
    ranks = job.parameters.get("world_sizes") or [job.parameters.get("world_size", 1)]
    return max(ranks) if job.parameters.get("backend") == "nccl" else 1


def _is_due(job: Job, output: Path) -> bool:
    records = {path.parent: runs.load_record(path) for path in output.glob(f"*/{job.name}.json")}
    return all(runs.why_again(job, record, folder) for folder, record in records.items())


def _slurm(*command: str) -> subprocess.CompletedProcess:
    if shutil.which(command[0]) is None:
        raise BatchError(f"there is no {command[0]} here; --cluster slurm is for a node of a Slurm cluster")
    return subprocess.run(command, capture_output=True, text=True)


def _submit(
    job: Job, command: Sequence[str], output: Path, gpus: int, after: Sequence[str]
) -> subprocess.CompletedProcess:
    asked = ["--parsable", "--nodes=1", f"--job-name={job.name}", f"--comment={output}"]
    asked += [f"--output={output}/slurm/{job.name}.log", f"--wrap=exec {shlex.join([*command, job.name])}"]
    asked += [f"--gpus-per-node={gpus}"] * (gpus > 0)
    asked += [f"--dependency=afterany:{':'.join(after)}"] * (len(after) > 0)
    return _slurm("sbatch", *asked)


def _listed(output: Path) -> dict[str, str]:
    """The numbers of my jobs with results in a folder that wait or run, by their names."""
    done = _slurm("squeue", "--me", "--noheader", "--format=%i|%j|%k")
    if done.returncode:
        raise BatchError(f"Slurm does not answer ({_last(done.stderr)}); the same command continues")
    lines = [line.split("|", 2) for line in done.stdout.splitlines()]
    return {name: number for number, name, comment in lines if comment == str(output)}


def _record(job: Job, number: str, refused: str, output: Path) -> runs.Record:
    """How a job ended; of one that was refused, or killed before it could say, what Slurm says."""
    for path in [] if refused else output.glob(f"*/{job.name}.json"):
        if record := runs.load_record(path):
            return record
    said = "" if refused else _slurm("scontrol", "show", "job", number).stdout  # it forgets one after minutes
    state = ", ".join(re.findall(r"(?:JobState|Reason)=(\S+)", said)) or "Slurm does not know it any more"
    why = refused or f"Slurm job {number} ended without a record: {state}"
    return {"notebook": job.notebook.stem, "parameters": job.line(), **asdict(Outcome("error", why))}


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
