"""A batch on a Slurm cluster: its entries as a job array, one for each number of GPUs that an entry needs.

Partition, account, time limit and the like are Slurm's own variables, SBATCH_PARTITION and so on. The same
command submits what is not done; of an entry that is still in an array of before one job waits for the other.
"""

import hashlib
import shlex
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import tqdm

from labbook.book import batch
from labbook.book.batch import Job, Record
from labbook.book.notebooks import BatchError, is_last
from labbook.files import make_folder

_LOOK_EVERY_S = 5


def run_batch(
    jobs: Sequence[Job], command: Sequence[str], output: Path, *, gpu: bool, force: bool = False
) -> list[Record]:
    """Submit what is not done and unchanged, and wait for its end; how each job ended.

    command: executes the job whose name is put at its end, with records in a folder of `output`.
    gpu: whether a job gets GPUs: as many as it has ranks, at least one.
    Raises BatchError: there is no Slurm here.
    Raises KeyboardInterrupt: Ctrl-C; all jobs of this folder of results are cancelled.
    """
    if shutil.which("sbatch") is None:
        raise BatchError("there is no sbatch here; --cluster slurm is for a node of a Slurm cluster")
    name = f"workbook-{hashlib.sha256(str(output).encode()).hexdigest()[:8]}"
    due = [job for job in jobs if force or all(batch.why_again(job, p.parent) for p in _records(job, output))]
    said, started = dict[str, str](), list[subprocess.Popen]()
    for path in [path for job in due for path in _records(job, output)]:
        path.unlink()  # so that one that is there is of now
    try:
        with tqdm.tqdm(total=len(due), unit="notebook", disable=None) as bar:
            for last in (False, True):  # it shows what the others found
                arrays = defaultdict(list)
                for job in [job for job in due if is_last(job.notebook.stem) == last]:
                    ranks = job.parameters.get("world_sizes") or [job.parameters.get("world_size", 1)]
                    own = job.parameters.get("backend") == "nccl"  # a GPU for each rank
                    arrays[gpu * (max(ranks) if own else 1)].append(job.name)
                started = [_submit(name, names, command, output, gpus) for gpus, names in arrays.items()]
                while any(process.poll() is None for process in started):
                    time.sleep(_LOOK_EVERY_S)
                    bar.update(sum(bool(_records(job, output)) for job in due) - bar.n)
                for names, process in zip(arrays.values(), started, strict=True):
                    number, error = (text.strip() for text in process.communicate())
                    logs = [output / "slurm" / f"{number}_{place}.log" for place, _ in enumerate(names)]
                    texts = [log.read_text() if log.exists() else error for log in logs]
                    said |= dict(zip(names, texts, strict=True))
    except KeyboardInterrupt:
        subprocess.run(["scancel", f"--name={name}"], capture_output=True)
        for process in started:
            process.terminate()
        raise
    return [_record(job, output, said.get(job.name, "")) for job in jobs]


def _submit(name: str, jobs: list[str], command: Sequence[str], output: Path, gpus: int) -> subprocess.Popen:
    """An sbatch that ends when its array has, having printed its number, or why it was refused."""
    asked = ["--wait", "--parsable", "--nodes=1", f"--job-name={name}", f"--array=0-{len(jobs) - 1}"]
    asked += [f"--gpus-per-node={gpus}"] * (gpus > 0)
    asked += [f"--output={make_folder(output / 'slurm')}/%A_%a.log"]
    asked += [f"--wrap=set -- {shlex.join(jobs)}; shift $SLURM_ARRAY_TASK_ID; exec {shlex.join(command)} $1"]
    return subprocess.Popen(["sbatch", *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _records(job: Job, output: Path) -> list[Path]:
    return [*output.glob(f"*/{job.name}.json")]


def _record(job: Job, output: Path, said: str) -> Record:
    """How a job ended; of one that was refused, or killed before it could say, what Slurm said last."""
    for path in _records(job, output):
        return batch.load_record(path)
    why = f"no record, and Slurm says: {(said.strip().splitlines() or ['nothing'])[-1]}"
    return Record("error", why, 0.0, job.notebook.stem, job.line())
