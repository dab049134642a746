"""Launching: results by rank, every way to fail, nothing left behind, and the same worker under torchrun."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import launch_workers
import psutil
import pytest

from cs336_systems.parallel import WorkerError, backends_here, launch, stream
from cs336_systems.parallel.__main__ import _send, main

# For scripts in processes of their own, which import launch_workers, too.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent)] + sys.path)}


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def nothing_left():
    """Processes started in the test are gone after it, with theirs; the helpers of multiprocessing stay."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    commands = [" ".join(process.cmdline()) for process in left]
    helpers = ("resource_tracker", "forkserver")
    assert all(any(helper in command for helper in helpers) for command in commands), commands


def test_results_come_back_by_rank_and_prints_whole(monkeypatch, nothing_left, capsys):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    results = launch(
        launch_workers.report, 2, "word", number=3, size=80_000_000, lines=20_000, backend="gloo"
    )
    for rank, (context, args, kwargs, total, environment, pid, large) in enumerate(results):
        assert context == (rank, 2, "gloo", "cpu")
        assert (args, kwargs) == (("word",), {"number": 3})
        assert (total.item(), len(large)) == (2.0, 80_000_000)
        assert environment == {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
        assert not _alive(pid)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[rank 1] ")]
    assert "UserWarning: careful" in lines[0]
    assert lines[-20_001:-1] == [f"[rank 1] {number}" for number in range(20_000)]
    assert lines[-1] == "[rank 1] native words, no newline"


def test_what_rank_0_sends_comes_at_once_and_a_loop_that_is_left_ends_the_workers(nothing_left):
    sent = stream(launch_workers.count, 2, 1000, backend="gloo")
    for expected, (rank, number, sent_at) in enumerate(sent):
        assert (rank, number) == (0, expected)
        assert time.time() - sent_at < 0.25
        if number == 2:
            break


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["rank 1 of 2 raised KeyError: 'the culprit'", "and what it was at"]),
        ("kill", ["rank 1 of 2 ended with SIGKILL"]),
        ("segfault", ["rank 1 of 2 ended with SIGSEGV", "launch_workers.py", "in fail_on"]),
        ("vanish", ["rank 1 of 2 ended with exit code 0 before it returned"]),
    ],
)
def test_a_failure_ends_all_and_names_its_cause(how, expected, nothing_left):
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        launch(launch_workers.fail_on, 2, 1, how, backend="gloo")
    assert time.monotonic() - start < 30
    assert caught.value.cause in expected[0]
    assert "rank" not in caught.value.cause
    assert all(words in str(caught.value) for words in expected)


@pytest.mark.parametrize(
    ("backend", "timeout_s"), [("gloo", 8), pytest.param("nccl", 25, marks=pytest.mark.gpu(2))]
)
def test_a_hang_ends_with_the_stack_of_every_worker(backend, timeout_s, nothing_left, capsys):
    # The first workers wait for their server to import torch, which may take longer than they have.
    launch(launch_workers.report_ranks, 2, 0, backend=backend)
    with pytest.raises(WorkerError, match=f"not done within {timeout_s} s") as caught:
        launch(launch_workers.fail_on, 2, 1, "hang", backend=backend, timeout_s=timeout_s)
    assert "in _leave_children_and_hang" in str(caught.value)
    assert "in barrier" in str(caught.value)
    assert not _alive(int(capsys.readouterr().out.split()[-1]))  # the child of a worker


@pytest.mark.gpu(2)
def test_over_nccl_each_worker_has_its_gpu_and_a_failure_ends_all(nothing_left):
    for rank, (context, _, _, total, *_) in enumerate(launch(launch_workers.report, 2)):
        assert (context, total.item()) == ((rank, 2, "nccl", f"cuda:{rank}"), 2.0)
    with pytest.raises(WorkerError, match="rank 1 of 2 raised KeyError: 'the culprit'"):
        launch(launch_workers.fail_on, 2, 1, "raise")


def test_workers_and_their_children_die_with_a_killed_caller(tmp_path):
    """The caller is a script that guards nothing; its processes do not run it again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import launch_workers as w; from cs336_systems.parallel import launch; launch(w.call_and_hang, 2)"
    )
    how = {"env": ENVIRONMENT, "stdout": subprocess.PIPE, "text": True}
    caller = subprocess.Popen([sys.executable, "-u", script], **how)
    lines = [caller.stdout.readline() for _ in range(2)]
    pids = [int(pid) for line in lines for pid in line.split()[2:]]  # after "[rank 0]"
    assert len(pids) == 4
    assert all(map(_alive, pids))
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    caller.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


SCRIPT = """
from dataclasses import dataclass
from cs336_systems.parallel import WorkerError, launch

@dataclass
class Point:
    x: int

SCALE = 3

def work(context, point, function):
    return Point(SCALE * function(point.x) + context.rank)

def fail(context):
    raise Odd("a sentence")

class Odd(Exception): pass

print("started")
first, second = launch(work, 2, Point(1), lambda x: x + 1, backend="gloo")
assert type(first) is Point and (first, second) == (Point(6), Point(7))
try:
    launch(fail, 1, backend="gloo")
except WorkerError as error:
    print(error.cause)
"""


@pytest.mark.parametrize("folder", ["a?b#c%20d e[f]", "x" * 120])
def test_a_script_sends_what_it_defines_by_value_whatever_surrounds_it(folder, tmp_path):
    """Its functions, classes and globals; under a strange or long TMPDIR, and with MASTER_PORT in use."""
    (tmp_path / folder).mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(used.getsockname()[1])}
        how = {"env": ENVIRONMENT | port | {"TMPDIR": str(tmp_path / folder)}}
        command = [sys.executable, tmp_path / "script.py"]
        done = subprocess.run(command, **how, capture_output=True, text=True)
    assert done.stdout == "started\nOdd: a sentence\n", done.stderr
    assert list((tmp_path / folder).iterdir()) == []


def test_every_rank_of_every_launch_draws_its_own_numbers():
    draws = launch(launch_workers.draw, 2) + launch(launch_workers.draw, 2)
    assert [len(set(numbers)) for numbers in zip(*draws, strict=True)] == [4, 4, 4]


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="cannot be sent"):
        launch(launch_workers.report, 1, (x for x in ()))
    with pytest.raises(ValueError, match="timeout_s"):
        launch(launch_workers.report, 1, timeout_s=0)
    with pytest.raises(ValueError, match="world_size"):
        launch(launch_workers.report, 0)


def test_backend_is_chosen_by_what_is_there(monkeypatch, capsys):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert backends_here("auto", [1, 2, 3]) == {1: "nccl", 2: "nccl", 3: "gloo"}
    assert backends_here("nccl", [2, 4]) == {2: "nccl"}
    assert "world size 4: not possible here" in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs 3 GPUs, one a worker; this machine has 2"):
        launch(launch_workers.report, 3, backend="nccl")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert backends_here("auto", [1]) == {1: "gloo"}


def test_torchrun_runs_the_same_worker_on_two_nodes():
    """Two torchrun agents on loopback stand for two machines with two workers each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    work = ["-m", "cs336_systems.parallel", "launch_workers:report_ranks", "--backend=gloo"]
    work += ["--arguments", '{"offset": 10}']
    how = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    commands = [command + [f"--node-rank={node}"] + work for node in range(2)]
    nodes = [subprocess.Popen(command, **how) for command in commands]
    printed = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    # Rows as they come, of what is no JSON what Python shows; then rank and local rank of all workers.
    rows = ['{"case": 1}', '{"no JSON": "torch.float32"}', "[[10, 0], [11, 1], [12, 0], [13, 1]]"]
    assert printed[0].splitlines() == rows
    assert printed[1] == ""


def test_what_json_lacks_is_sent_as_python_shows_it(capsys):
    _send({(1, 2): Path()})
    assert "{(1, 2): PosixPath('.')}" in capsys.readouterr().out


def test_the_command_line_says_that_it_needs_torchrun(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cs336_systems.parallel", "launch_workers:count"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "start it with torchrun" in capsys.readouterr().err
