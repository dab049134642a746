"""A batch on Slurm, for which commands of its names stand in: what ends, fails, is killed, and goes on."""

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from labbook.book import batch as batches
from labbook.book import notebooks
from labbook.book.batch import Job
from labbook.book.execution import Outcome
from labbook.book.notebooks import BatchError
from labbook.book.slurm import run_on_slurm
from labbook.files import write_record

# It runs the job itself; the jobs of a partition "none" never begin.
SBATCH = """\
#!/bin/sh
for word; do case $word in
    --output=*) log=${word#--output=} ;;
    --wrap=*) job=${word#--wrap=} ;;
    --gpus-per-node=*) export GPUS=${word#*=} ;;
    --wait|--nodes=1|--job-name=*|--open-mode=append) ;;
    *) echo "unknown option $word"; exit 1 ;;
esac; done
echo Submitted batch job 5
[ "$SBATCH_PARTITION" = none ] || sh -c "$job" >>"$log" 2>&1
"""
# In place of a notebook: what its job does.
RUN = """\
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from labbook.book.execution import Outcome
output, name = Path(sys.argv[1]), sys.argv[-1]
with open(output / "started", "a") as started:
    print(name, os.environ.get("GPUS", 0), file=started)
time.sleep(60 if "slow" in name else 0)
if "killed" in name and not (output / "again").exists():
    sys.exit("CANCELLED")
outcome = Outcome("error", "cell [1]: Bad: luck") if "fails" in name else Outcome("ok")
machine = "m" if "GPUS" in os.environ else "cpu-m"
(output / machine).mkdir(exist_ok=True)
(output / machine / f"{name}.json").write_text(json.dumps(asdict(outcome)))
"""


@pytest.fixture
def batch(tmp_path, monkeypatch, write_notebook):
    """Runs jobs of these names: batch("11_ok", ...)."""
    commands = {"sbatch": SBATCH, "scancel": f'#!/bin/sh\necho "$*" >{tmp_path}/cancelled\n'}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(notebooks, "folder", lambda: tmp_path)
    (tmp_path / "book.yaml").write_text("last: [00_last]")
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path)]

    def run(*names, gpu=False, **parameters):
        jobs = [Job(write_notebook(tmp_path / f"{name}.ipynb"), parameters) for name in names]
        return run_on_slurm(jobs, command, tmp_path, gpu=gpu)

    return run


def test_each_ends_in_the_summary_and_the_last_comes_after_the_others(batch, tmp_path):
    outcomes = batch("00_last", "11_ok", "12_fails")
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "error"]
    assert outcomes[2].reason == "cell [1]: Bad: luck"
    assert (tmp_path / "started").read_text().split()[-2:] == ["00_last", "0"]


def test_an_entry_gets_as_many_gpus_as_it_has_ranks(batch, tmp_path):
    (outcome,) = batch("11_two", gpu=True, backend="nccl", world_sizes=[1, 2])
    assert outcome.status == "ok"
    batch("12_one", gpu=True, backend="gloo", world_size=2)
    assert (tmp_path / "started").read_text().split()[1::2] == ["2", "1"]


def test_a_killed_job_is_a_row_and_done_again(batch, tmp_path, monkeypatch):
    outcomes = batch("11_killed", "12_ok")
    assert [outcome.status for outcome in outcomes] == ["error", "ok"]
    assert "CANCELLED" in outcomes[0].reason
    (tmp_path / "again").touch()
    assert batch("11_killed")[0].status == "ok"
    started = (tmp_path / "started").read_text()
    monkeypatch.setattr(batches, "reason_to_run", lambda *_: "")
    assert [outcome.status for outcome in batch("11_killed", "12_ok")] == ["ok", "ok"]
    assert (tmp_path / "started").read_text() == started


def test_what_is_interrupted_is_cancelled(batch, tmp_path):
    def interrupt():
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # A process that a shell has put into the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            batch("11_slow", "12_slow")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "cancelled").read_text().startswith("--name=workbook-")
    waiting = [child for child in psutil.Process().children() if child.name() == "sbatch"]
    assert not psutil.wait_procs(waiting, timeout=10)[1]


def test_where_there_is_no_slurm_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BatchError, match="there is no sbatch here; --cluster slurm is for"):
        run_on_slurm([], [], tmp_path, gpu=False)


def test_a_receipt_is_no_reason(batch, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "none")
    (outcome,) = batch("13_one")
    assert "job 5 ended before it began" in outcome.reason


@pytest.mark.parametrize(("machine", "gpu"), [("cpu-login-node", True), ("h100", False)])
def test_what_is_done_on_the_other_kind_of_machine_is_not_done(
    batch, tmp_path, monkeypatch, machine, gpu
):
    monkeypatch.setattr(batches, "reason_to_run", lambda *_: "")
    write_record(tmp_path / machine / "13_one.json", Outcome("ok", notebook="13_one"))
    batch("13_one", gpu=not gpu)
    assert not (tmp_path / "started").exists()
    batch("13_one", gpu=gpu)
    assert (tmp_path / "started").exists()
