"""A batch on a Slurm cluster: an array of jobs for each number of GPUs, a job for each entry of the plan.

Partition, account, time limit and the like are Slurm's own variables, SBATCH_PARTITION and so on. Which jobs
were submitted stands in `slurm.json` beside the results: the same command waits for those that Slurm still
lists, and submits what is left. Ctrl-C cancels them.
"""

import json
import re
import shlex
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from labbook.book import runs
from labbook.book.batch import Job
from labbook.book.execute import Outcome
from labbook.book.notebooks import BatchError, is_last
from labbook.files import make_folder, write_atomically

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
    log, state = make_folder(output / "slurm"), output / "slurm.json"
    listed, before = _listed(), json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    submitted = {name: number for name, number in before.items() if number in listed}
    due = [job for job in jobs if job.name not in submitted and (force or not _is_done(job, output))]
    refused: dict[str, str] = {}
    try:
        for last in (False, True):  # what shows the others' results comes after them
            arrays = defaultdict(list)
            for job in due:
                if is_last(job.notebook.stem) == last:
                    arrays[_gpus(job) if gpu else 0].append(job)
            for gpus, array in arrays.items():
                for job in array:
                    if job.name in before:
                        print(f"Slurm lists job {before[job.name]} no more: {job.name} is submitted again")
                    for record in output.glob(f"*/{job.name}.json"):
                        record.unlink()  # so that one that is there is this job's
                after = [] if not last else sorted({number.split("_")[0] for number in submitted.values()})
                number, why = _submit(array, command, log, gpus, after)
                numbers = {job.name: f"{number}_{n}" for n, job in enumerate(array)}
                refused |= dict.fromkeys(numbers, why) if why else {}
                submitted |= {} if why else numbers
                write_atomically(state, json.dumps(submitted, indent=1))
        _wait(set(submitted.values()))
    except KeyboardInterrupt:
        subprocess.run(["scancel", *submitted.values()], capture_output=True)
        state.unlink(missing_ok=True)
        raise
    state.unlink(missing_ok=True)
    return [_record(job, submitted.get(job.name, ""), refused.get(job.name, ""), output) for job in jobs]


def _gpus(job: Job) -> int:
    """How many GPUs an entry needs: one for each of its ranks, if they are to have their own."""
    ranks = job.parameters.get("world_sizes") or [job.parameters.get("world_size", 1)]
    return max(ranks) if job.parameters.get("backend") == "nccl" else 1


def _is_done(job: Job, output: Path) -> bool:
    records = {path.parent: runs.load_record(path) for path in output.glob(f"*/{job.name}.json")}
    return any(runs.why_again(job, record, folder) is None for folder, record in records.items())


def _slurm(*command: str, script: str = "") -> subprocess.CompletedProcess:
    if shutil.which(command[0]) is None:
        raise BatchError(f"there is no {command[0]} here; --cluster slurm is for a node of a Slurm cluster")
    return subprocess.run(command, input=script, capture_output=True, text=True)


def _submit(
    array: Sequence[Job], command: Sequence[str], log: Path, gpus: int, after: Sequence[str]
) -> tuple[str, str]:
    """Submit an array: the number that Slurm gave it, or why it did not."""
    names = shlex.join(job.name for job in array)
    script = f'#!/bin/sh\nset -- {names}\nshift "$SLURM_ARRAY_TASK_ID"\nexec {shlex.join(command)} "$1"\n'
    asked = ["--parsable", "--nodes=1", f"--array=0-{len(array) - 1}", f"--output={log}/%A_%a.log"]
    asked += [f"--gpus-per-node={gpus}"] * (gpus > 0)
    asked += [f"--dependency=afterany:{':'.join(after)}"] * (len(after) > 0)
    done = _slurm("sbatch", "--job-name=labbook", *asked, script=script)
    number = done.stdout.strip().partition(";")[0]
    print(f"{len(array)} jobs, GPUs of each: {gpus}: {number or 'refused'}")
    return number, f"Slurm refused a job with {gpus} GPUs: {_last(done.stderr)}" if done.returncode else ""


def _listed() -> set[str]:
    """My jobs that wait or run, an element of an array each: 17_0."""
    done = _slurm("squeue", "--me", "--noheader", "--array", "--format=%i")
    if done.returncode:
        raise BatchError(f"Slurm does not answer ({_last(done.stderr)}); the same command continues")
    return set(done.stdout.split())


def _wait(numbers: set[str]) -> None:
    left = None
    while (now := numbers & _listed()) != set():
        if now != left:
            print(f"{len(now)} of {len(numbers)} jobs wait or run", flush=True)
        left = now
        time.sleep(_LOOK_EVERY_S)


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
