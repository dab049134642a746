"""Launching: results by rank, every way to fail, nothing left behind, and the same worker under torchrun."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import launch_workers
import pytest
import torch

from cs336_systems.parallel import WorkerContext, WorkerError, launch
from cs336_systems.parallel.worker import backends_here, choose_backend, find_worker, why_no_nccl

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _processes_below(pid: int) -> set[int]:
    listing = subprocess.check_output(["ps", "-eo", "pid=,ppid=,pgid="], text=True)
    table = [tuple(map(int, line.split())) for line in listing.splitlines()]
    groups = {own for own, parent, _ in table if parent == pid}
    return {own for own, _, group in table if group in groups}


def test_results_come_back_by_rank(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    results = launch(launch_workers.report, 2, "word", number=3, backend="gloo")
    for rank, (context, args, kwargs, total, environment, pid) in enumerate(results):
        assert (context.rank, context.world_size, context.backend) == (rank, 2, "gloo")
        assert isinstance(context, WorkerContext)
        assert context.device.type == "cpu"
        assert (args, kwargs, total) == (("word",), {"number": 3}, 2.0)
        assert environment == {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
        assert not _alive(pid)


def test_prints_appear_with_their_rank(capsys):
    launch(launch_workers.talk, 1, backend="gloo")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[rank 0] hello"
    assert "UserWarning: careful" in lines[1]
    assert lines[-1] == "[rank 0] native words, no newline"


def test_no_print_is_lost_at_the_end(capsys):
    launch(launch_workers.talk_much, 1, 30_000, backend="gloo")  # 3 MB at once
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank 0] {number} {'.' * 90}" for number in range(30_000)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["rank 1 of 2 raised KeyError: 'the culprit'", 'raise KeyError("the culprit")']),
        ("kill", ["rank 1 of 2 was ended by SIGKILL"]),
        ("segfault", ["rank 1 of 2 was ended by SIGSEGV", "launch_workers.py", "in fail_on"]),
        ("vanish", ["rank 1 of 2 ended with exit code 0 before it returned"]),
    ],
)
def test_a_failure_ends_all_and_names_its_cause(how, expected):
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        launch(launch_workers.fail_on, 2, 1, how, backend="gloo")
    assert time.monotonic() - start < 30
    assert caught.value.rank == 1
    assert all(words in str(caught.value) for words in expected)
    assert not _processes_below(os.getpid())


def test_a_hang_ends_with_the_stack_of_every_worker():
    with pytest.raises(WorkerError, match="not done within 8 s") as caught:
        launch(launch_workers.fail_on, 2, 1, "hang", backend="gloo", timeout_s=8)
    assert "in _leave_children_and_hang" in str(caught.value)
    assert "in barrier" in str(caught.value)
    assert not _processes_below(os.getpid())


@pytest.mark.gpu(2)
def test_over_nccl_each_worker_has_its_gpu_and_a_failure_ends_all(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    for rank, (context, _, _, total, environment, _) in enumerate(launch(launch_workers.report, 2)):
        assert (context.backend, context.device, total) == ("nccl", torch.device("cuda", rank), 2.0)
        assert environment["NCCL_NVLS_ENABLE"] == "0"
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 2 raised KeyError: 'the culprit'"):
        launch(launch_workers.fail_on, 2, 1, "raise")
    assert time.monotonic() - start < 60
    assert not _processes_below(os.getpid())


@pytest.mark.gpu(2)
def test_over_nccl_a_hang_ends_with_the_stack_of_every_worker():
    with pytest.raises(WorkerError, match="not done within 25 s") as caught:
        launch(launch_workers.fail_on, 2, 1, "hang", timeout_s=25)
    assert "in _leave_children_and_hang" in str(caught.value)
    assert "in barrier" in str(caught.value)
    assert not _processes_below(os.getpid())


def test_workers_die_with_a_killed_caller():
    script = (
        "import launch_workers as w; from cs336_systems.parallel import launch; launch(w.call_and_hang, 2)"
    )
    command = [sys.executable, "-u", "-c", script]
    caller = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert {caller.stdout.readline().strip() for _ in range(2)} == {"[rank 0] here", "[rank 1] here"}
    workers = _processes_below(caller.pid)
    assert len(workers) == 2
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    caller.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, workers))


def test_what_cannot_be_pickled_is_said_in_a_sentence():
    with pytest.raises(TypeError, match="arguments cannot be sent"):
        launch(launch_workers.report, 1, lambda: None)
    with pytest.raises(WorkerError, match="the worker's result, a function, cannot be sent back"):
        launch(launch_workers.return_a_lambda, 1, backend="gloo")


def _local_worker(context):
    pass


@pytest.mark.parametrize("worker", [lambda context: None, "report", 3, print.__call__])
def test_a_worker_that_cannot_be_imported_is_refused(worker):
    with pytest.raises(ValueError, match="at the top level of a module"):
        launch(worker, 1)


def test_a_worker_of_a_notebook_is_refused(monkeypatch):
    monkeypatch.setattr(_local_worker, "__module__", "__main__")
    with pytest.raises(ValueError, match="defined in a notebook"):
        launch(_local_worker, 1)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2", True])
def test_world_size_is_checked(world_size):
    with pytest.raises(ValueError, match="allowed: a whole number, 1 or more"):
        launch(launch_workers.report, world_size)


def test_backend_is_chosen_by_what_is_there(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [choose_backend("auto", workers) for workers in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert choose_backend("gloo", 2) == "gloo"
    with pytest.raises(ValueError, match="3 workers a GPU and this machine has 2"):
        choose_backend("nccl", 3)
    assert why_no_nccl(2) == ""
    assert "3 workers a GPU and this machine has 2" in why_no_nccl(3)
    with pytest.raises(ValueError, match="'mpi' is unknown; allowed: auto, gloo, nccl"):
        choose_backend("mpi", 1)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert choose_backend("auto", 1) == "gloo"


def test_a_notebook_skips_what_cannot_run_here(monkeypatch, capsys):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert backends_here("auto", [2, 4]) == {2: "nccl", 4: "gloo"}
    assert backends_here("nccl", [2, 4]) == {2: "nccl"}
    assert backends_here("gloo", [2, 4]) == {2: "gloo", 4: "gloo"}
    why = " (backend 'nccl' gives each of the 4 workers a GPU and this machine has 2)"
    said = ["2: nccl", "4: gloo" + why, "2: nccl", "4: not possible here" + why, "2: gloo", "4: gloo"]
    assert capsys.readouterr().out.splitlines() == [f"world size {words}" for words in said]
    with pytest.raises(ValueError, match="'mpi' is unknown; allowed: auto, gloo, nccl"):
        backends_here("mpi", [2])


@pytest.mark.parametrize("address", ["no_colon", "no_such_module:f", "launch_workers:no_such_function"])
def test_find_worker_says_what_is_wrong(address):
    with pytest.raises(ValueError, match=f"worker '{address}'"):
        find_worker(address)


def test_torchrun_runs_the_same_worker_on_two_nodes(tmp_path):
    """Two torchrun agents on loopback stand for two machines with two workers each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    work = ["-m", "cs336_systems.parallel", "launch_workers:report_ranks", "--backend=gloo"]
    work += ["--arguments", '{"offset": 10}', "--output", str(tmp_path / "out.json")]
    nodes = [subprocess.Popen([*command, f"--node-rank={node}", *work], env=environment) for node in range(2)]
    assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    # rank, local rank: on every node the workers count their devices from 0
    assert json.loads((tmp_path / "out.json").read_text()) == [[10, 0], [11, 1], [12, 0], [13, 1]]


def test_the_command_line_launches_on_this_machine():
    command = [sys.executable, "-m", "cs336_systems.parallel", "launch_workers:report_ranks", "--workers=2"]
    run = subprocess.run(
        [*command, "--backend=gloo", "--arguments", '{"offset": 1}'],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == [[1, 0], [2, 1]]
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["launch_workers:nothing"], "cannot be imported"),
        (["launch_workers:talk", "--arguments", "[1]"], "not a JSON object"),
    ],
)
def test_the_command_line_refuses_in_a_sentence(arguments, sentence):
    command = [sys.executable, "-m", "cs336_systems.parallel", *arguments]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 2
    assert sentence in run.stderr
