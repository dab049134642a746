"""A batch on a Slurm cluster: each job is one of Slurm's, with the GPUs it needs.

Partition, account, time limit and the like are Slurm's own variables, SBATCH_PARTITION and so on.
"""

import hashlib
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from labbook.book import batch
from labbook.book.batch import Job
from labbook.book.execution import Outcome
from labbook.book.notebooks import BatchError
from labbook.files import make_folder


def run_on_slurm(
    jobs: list[Job], command: list[str], output: Path, *, gpu: bool, force: bool = False
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
    cluster = _Cluster(command, output, gpu)
    due = [job for job in jobs if force or cluster.is_due(job)]
    for job in due:
        for path in cluster.outcome_paths(job):
            path.unlink()  # so that one that is there is of now
    for together in batch.in_turn(due):
        cluster.run(together)
    return [cluster.outcome(job) for job in jobs]


class _Cluster(NamedTuple):
    """A cluster that executes jobs by a command, with GPUs or without; their outcomes are below `output`."""

    command: list[str]
    output: Path
    gpu: bool

    def run(self, jobs):
        """Submit jobs, wait for them, print how each ended; Ctrl-C cancels them."""
        name = f"workbook-{hashlib.sha256(str(self.output).encode()).hexdigest()[:8]}"
        submitted = []
        try:
            submitted = [(job, self.submit(job, name)) for job in jobs]
            for job, process in submitted:
                process.wait()
                print(batch.summary([self.outcome(job)]), flush=True)
        except KeyboardInterrupt:
            subprocess.run(["scancel", f"--name={name}"], capture_output=True)
            for _, process in submitted:
                process.terminate()
            raise

    def submit(self, job, name):
        """An sbatch that ends when its job has; what both say goes into the log of the job."""
        log = self.log(job)
        make_folder(log.parent)
        command = f"sbatch --wait --nodes=1 --job-name={name} --open-mode=append".split()
        command += [f"--output={log}", f"--wrap=exec {shlex.join(self.command + [job.name])}"]
        if self.gpu:
            command.append(f"--gpus-per-node={_gpus(job)}")
        with open(log, "a") as file:
            return subprocess.Popen(command, stdout=file, stderr=file)

    def is_due(self, job):
        """Whether a job has to run: where a machine has it done and unchanged, it has not."""
        return all(batch.reason_to_run(job, path.parent) for path in self.outcome_paths(job))

    def outcome_paths(self, job):
        """The outcomes of a job, by machine: of those with GPUs, or of those without."""
        paths = self.output.glob(f"*/{job.name}.json")
        return [path for path in paths if path.parent.name.startswith("cpu-") != self.gpu]

    def outcome(self, job):
        """How a job ended; of one that was refused, or killed before it could say, what Slurm said last."""
        for path in self.outcome_paths(job):
            return batch.load_outcome(path)
        last_line = self.log(job).read_text().strip().rpartition("\n")[2]
        reason = f"no record, and Slurm says: {last_line}"
        if last_line.startswith("Submitted batch job"):  # its receipt, no reason
            reason = f"no record: {last_line[10:]} ended before it began (scancel?)"
        return Outcome("error", reason, notebook=job.notebook.stem, parameters=job.line())

    def log(self, job):
        """Where what Slurm says of a job stands, and what the job says."""
        return self.output / "slurm" / f"{job.name}.log"


def _gpus(job):
    """NCCL's ranks have one each, Gloo's share one."""
    world_sizes = job.parameters.get("world_sizes") or [job.parameters.get("world_size", 1)]
    return max(world_sizes) if job.parameters.get("backend") == "nccl" else 1
