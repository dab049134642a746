"""A batch on a real Slurm of one node, started here: what ends, fails, is killed, refused, and goes on."""

import os
import shutil
import signal
import socket
import subprocess
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

SLURM = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in SLURM if shutil.which(name, path=PATH) is None]
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
KillWait=1
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 Gres=gpu:2 State=UNKNOWN
NodeName=other NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=gpus Nodes={host} Default=YES
PartitionName=none Nodes=other
"""
# In place of a notebook: what its job does.
RUN = """\
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from labbook.book.execution import Outcome
output, name = Path(sys.argv[1]), sys.argv[-1]
with open(output / "started", "a") as started:
    print(name, os.environ.get("SLURM_GPUS_ON_NODE", 0), file=started)
while "slow" in name and not (output / "finish").exists():
    time.sleep(0.1)
outcome = Outcome("error", "cell [1]: Bad: luck") if "fails" in name else Outcome("ok")
(output / "m").mkdir(exist_ok=True)
(output / "m" / f"{name}.json").write_text(json.dumps(asdict(outcome)))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment in which Slurm's commands speak to a cluster of this machine."""
    if MISSING or os.getuid():
        pytest.skip(
            f"a Slurm of one node needs root, and {', '.join(SLURM)} (Debian: slurm-wlm, munge)"
        )
    folder = tmp_path_factory.mktemp("slurm")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    text = CONFIG.format(host=host, ports=ports, folder=folder)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
    subprocess.run(["mungekey", f"--keyfile={folder}/key"], env=env, check=True)
    for each in tmp_path_factory.getbasetemp(), folder:
        each.chmod(0o755)
    daemons = [
        ["munged", "-F", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/key",
         f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/seed", f"--log-file={folder}/munge.log"],
        ["slurmctld", "-D"], ["slurmd", "-D", "-N", host],
    ]  # fmt: skip
    with open(folder / "log", "w") as log:
        started = [subprocess.Popen(each, env=env, stdout=log, stderr=log) for each in daemons]
    try:
        idle = ["sinfo", "--noheader", "--partition=gpus", "--format=%t"]
        for _ in range(200):
            state = subprocess.run(idle, env=env, capture_output=True, text=True).stdout
            if state.strip() == "idle":
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"Slurm does not start: {(folder / 'log').read_text()}")
        yield env
    finally:
        for each in reversed(started):
            each.terminate()
            each.wait(30)


@pytest.fixture
def batch(cluster, tmp_path, monkeypatch, write_notebook):
    """Runs jobs of these names: batch("11_ok", ...)."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster[name])
    monkeypatch.setattr(notebooks, "folder", lambda: tmp_path)
    (tmp_path / "book.yaml").write_text("last: [00_last]")
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path)]

    def run(*names, gpu=False, **parameters):
        jobs = [Job(write_notebook(tmp_path / f"{name}.ipynb"), parameters) for name in names]
        return run_on_slurm(jobs, command, tmp_path, gpu=gpu)

    return run


@pytest.fixture
def when_it_runs(tmp_path):
    """Calls a function once a job that is slow has started."""

    def wait(function):
        started = tmp_path / "started"
        while not started.exists() or "slow" not in started.read_text():
            time.sleep(0.05)
        function()

    def start(function):
        threading.Thread(target=wait, args=(function,), daemon=True).start()

    return start


def test_each_ends_in_the_summary_and_the_last_comes_after_the_others(batch, tmp_path):
    outcomes = batch("00_last", "11_ok", "12_fails")
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "error"]
    assert outcomes[2].reason == "cell [1]: Bad: luck"
    assert (tmp_path / "started").read_text().split()[-2:] == ["00_last", "0"]


def test_an_entry_gets_as_many_gpus_as_it_has_ranks_or_a_sentence(batch, tmp_path, monkeypatch):
    (outcome,) = batch("11_two", gpu=True, backend="nccl", world_sizes=[1, 2])
    assert outcome.status == "ok"
    batch("12_one", gpu=True, backend="gloo", world_size=2)
    lines = (tmp_path / "started").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["2", "1"]
    monkeypatch.setenv("SBATCH_PARTITION", "none")
    (outcome,) = batch("13_none", gpu=True)
    assert outcome.status == "error"
    assert "not available" in outcome.reason


def test_a_killed_job_is_a_row_and_done_again(batch, when_it_runs, tmp_path, monkeypatch):
    alone = "until [ $(squeue -h | wc -l) = 1 ]; do sleep 0.1; done; scancel $(squeue -ho %i)"
    when_it_runs(lambda: subprocess.run(alone, shell=True))
    outcomes = batch("11_slow", "12_ok")
    assert [outcome.status for outcome in outcomes] == ["error", "ok"]
    assert "CANCELLED" in outcomes[0].reason
    (tmp_path / "finish").touch()
    assert batch("11_slow")[0].status == "ok"
    started = (tmp_path / "started").read_text()
    monkeypatch.setattr(batches, "reason_to_run", lambda *_: "")
    assert [outcome.status for outcome in batch("11_slow", "12_ok")] == ["ok", "ok"]
    assert (tmp_path / "started").read_text() == started


def test_what_is_interrupted_leaves_nothing(batch, when_it_runs, tmp_path):
    # A process that a shell has put into the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    when_it_runs(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            batch("11_slow", "12_slow")
    finally:
        signal.signal(signal.SIGINT, before)
    until = time.monotonic() + 10  # Slurm takes a moment to end them
    while (left := subprocess.check_output(["squeue", "--noheader"])) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    waiting = [child for child in psutil.Process().children() if child.name() == "sbatch"]
    assert not psutil.wait_procs(waiting, timeout=10)[1]


def test_where_there_is_no_slurm_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BatchError, match="there is no sbatch here; --cluster slurm is for"):
        run_on_slurm([], [], tmp_path, gpu=False)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A stand-in for sbatch that gives its receipt, as the real one does when its job never begins."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 5\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(notebooks, "is_last", lambda name: False)
    monkeypatch.setattr(batches, "reason_to_run", lambda *_: "")
    return Job(tmp_path / "13_one.ipynb")


def test_a_receipt_is_no_reason(stand_in, tmp_path):
    (outcome,) = run_on_slurm([stand_in], ["true"], tmp_path / "runs", gpu=True)
    assert "job 5 ended before it began" in outcome.reason


@pytest.mark.parametrize(("machine", "gpu"), [("cpu-login-node", True), ("h100", False)])
def test_what_is_done_on_the_other_kind_of_machine_is_not_done(stand_in, tmp_path, machine, gpu):
    done = Outcome("ok", notebook="13_one")
    write_record(tmp_path / "runs" / machine / f"{stand_in.name}.json", done)
    (outcome,) = run_on_slurm([stand_in], ["true"], tmp_path / "runs", gpu=gpu)
    assert outcome.status == "error"
    (outcome,) = run_on_slurm([stand_in], ["true"], tmp_path / "runs", gpu=not gpu)
    assert outcome.status == "ok"
