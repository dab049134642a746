"""A batch on a Slurm cluster: each job is one of Slurm's, with the GPUs it needs.

Partition, account, time limit and the like are Slurm's own variables, SBATCH_PARTITION and so on.
"""

import hashlib
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from labbook.book import batch, notebooks
from labbook.book.batch import Job
from labbook.book.execution import Outcome
from labbook.book.notebooks import BatchError
from labbook.files import make_folder


def run_on_slurm(
    jobs: Sequence[Job], command: Sequence[str], output: Path, *, gpu: bool, force: bool = False
) -> list[Outcome]:
    """Submit what is not done and unchanged, and wait for its end; how each job ended.

    command: executes the job whose name is put at its end, with outcomes in a folder of `output`.
    gpu: whether a job gets GPUs: as many as it has ranks, at least one.
    Raises BatchError: there is no Slurm here.
    Raises KeyboardInterrupt: Ctrl-C; all jobs of this folder of results are cancelled.
    """
    if not shutil.which("sbatch"):
        raise BatchError(
            "there is no sbatch here; --cluster slurm is for a node of a Slurm cluster"
        )
    name = f"workbook-{hashlib.sha256(str(output).encode()).hexdigest()[:8]}"
    due = [job for job in jobs if force or _is_due(job, output, gpu)]
    for job in due:
        for path in _outcomes(job, output, gpu):
            path.unlink()  # so that one that is there is of now
    submitted = []
    try:
        for is_last in (False, True):  # it shows what the others found
            together = [job for job in due if notebooks.is_last(job.notebook.stem) == is_last]
            submitted = [
                _submit(job, output, gpu, name, list(command) + [job.name]) for job in together
            ]
            for job, process in zip(together, submitted, strict=True):
                process.wait()
                print(batch.summary([_outcome(job, output, gpu)]), flush=True)
    except KeyboardInterrupt:
        subprocess.run(["scancel", f"--name={name}"], capture_output=True)
        for process in submitted:
            process.terminate()
        raise
    return [_outcome(job, output, gpu) for job in jobs]


def _submit(job, output, gpu, name, command):
    """An sbatch that ends when its job has; what both say goes into the log of the job."""
    log = _log(job, output)
    options = ["--wait", "--nodes=1", f"--job-name={name}", f"--output={log}", "--open-mode=append"]
    if gpu:
        options.append(f"--gpus-per-node={_gpus(job)}")
    make_folder(log.parent)
    with open(log, "a") as file:
        words = ["sbatch", f"--wrap=exec {shlex.join(command)}"]
        return subprocess.Popen(words + options, stdout=file, stderr=file)


def _gpus(job):
    """NCCL's ranks have one each, Gloo's share one."""
    world_sizes = job.parameters.get("world_sizes") or [job.parameters.get("world_size", 1)]
    return max(world_sizes) if job.parameters.get("backend") == "nccl" else 1


def _is_due(job, output, gpu):
    return all(batch.reason_to_run(job, path.parent) for path in _outcomes(job, output, gpu))


def _outcomes(job, output, gpu):
    """Files of how it ended, by machine: of those with GPUs, or of those without."""
    paths = output.glob(f"*/{job.name}.json")
    return [path for path in paths if path.parent.name.startswith("cpu-") != gpu]


def _outcome(job, output, gpu):
    """How a job ended; of one that was refused, or killed before it could say, what Slurm said last."""
    for path in _outcomes(job, output, gpu):
        return batch.load_outcome(path)
    last_line = _log(job, output).read_text().strip().rpartition("\n")[2]
    reason = f"no record, and Slurm says: {last_line}"
    if last_line.startswith("Submitted batch job"):  # its receipt, no reason
        reason = f"no record: {last_line[10:]} ended before it began (scancel?)"
    return Outcome("error", reason, notebook=job.notebook.stem, parameters=job.line())


def _log(job, output):
    return output / "slurm" / f"{job.name}.log"
