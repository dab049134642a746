"""Batches: what is done is not done again, what fails does not stop the rest, and a killed run continues."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from labbook.book import batch, notebooks
from labbook.book.batch import Job, Record


@pytest.fixture
def jobs(tmp_path, write_notebook, monkeypatch):
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)
    (tmp_path / "book.yaml").write_text("last: [00_start_here]\nneeds: {no_such_package: [13_nb]}")
    paths = {n: tmp_path / f"{n}_nb.ipynb" for n in (11, 12, 14)}
    return [Job(write_notebook(path, "print(steps)"), {"steps": n}) for n, path in paths.items()]


@pytest.fixture
def executed(monkeypatch):
    """Executions without a kernel: the list of what was executed; notebooks with 12 in their name fail."""
    done = []

    def execute(source, output, parameters):
        done.append(source.stem)
        nbformat.write(nbformat.read(source, as_version=4), output)
        failed = Record("error", "cell [1]: Bad: <luck>", 1.25)
        return failed if "12" in source.stem else Record("ok")

    monkeypatch.setattr(batch, "execute", execute)
    return done


def test_a_failure_does_not_stop_the_rest_and_is_done_again(jobs, executed, tmp_path, capsys):
    folder = tmp_path / "runs"
    records = batch.run_batch(jobs, folder)
    assert [record.status for record in records] == ["ok", "error", "ok"]
    assert executed == ["11_nb", "12_nb", "14_nb"]
    again = batch.run_batch(jobs, folder)
    assert executed[3:] == ["12_nb"]
    assert [again[0], again[2]] == [records[0], records[2]]
    batch.run_batch(jobs[:1], folder, force=True)
    assert executed[4:] == ["11_nb"]
    assert [batch.load_record(folder / f"{job.name}.json").status for job in jobs] == ["ok", "error", "ok"]
    assert "steps=12\n    cell [1]: Bad: <luck>" in batch.summary(records)


def test_what_cannot_run_is_skipped_with_its_reason_and_the_last_is_never_done(
    jobs, executed, tmp_path, write_notebook
):
    jobs[1:] = [Job(write_notebook(tmp_path / f"{name}.ipynb")) for name in ("13_nb", "00_start_here")]
    records = batch.run_batch(jobs, tmp_path / "runs")
    assert [record.status for record in records] == ["ok", "skipped", "ok"]
    assert "no_such_package" in batch.summary(records)
    batch.run_batch(jobs, tmp_path / "runs")
    assert executed == ["11_nb", "00_start_here", "00_start_here"]


def edit(old, new):
    return lambda job, output: job.notebook.write_text(job.notebook.read_text().replace(old, new))


CHANGES = {
    "its cells": edit("print(", "print(2 * "),
    "parameter rate": edit("rate = 0.5", "rate = 0.25"),
    "its notebook is gone": lambda job, output: output.unlink(),
    "": lambda job, output: output.with_suffix(".json").write_text('{"notebook":'),
    " ": lambda job, output: output.with_suffix(".json").write_text('{"of": "another"}'),
}


@pytest.mark.parametrize("why", CHANGES)
def test_what_changed_is_done_again_once_and_a_line_says_why(jobs, executed, tmp_path, capsys, why):
    batch.run_batch(jobs[:1], tmp_path / "runs")
    CHANGES[why](jobs[0], tmp_path / "runs" / f"{jobs[0].name}.ipynb")
    capsys.readouterr()
    for _ in range(2):
        batch.run_batch(jobs[:1], tmp_path / "runs")
        assert executed == ["11_nb", "11_nb"]
    said = capsys.readouterr().out
    assert f"again: 11_nb steps=11: {why}" in said if why.strip() else "again" not in said


def test_a_folder_that_cannot_be_is_said_before_anything_starts(jobs, executed, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="--output"):
        batch.run_batch(jobs, tmp_path / "file" / "runs")
    assert executed == []


# Asleep with the interpreter locked, as in a long call into C: such a kernel cannot notice that it is alone.
STEP = """\
import ctypes, os
open(f"started-{steps}", "a").write(f"{os.getpid()}\\n")
ctypes.PyDLL(None).sleep(60 if steps == 2 and not os.path.exists("finish") else 0)
"""
RUN = """\
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background hands on "ignore"
from labbook.book.batch import Job, run_batch
folder = Path(sys.argv[1])
run_batch([Job(folder / "11_nb.ipynb", {"steps": n}) for n in (1, 2)], folder / "runs")
"""


def is_running(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # that has ended, and waits for init
    return False


def test_a_killed_run_continues_and_two_at_once_do_everything_once(tmp_path, write_notebook):
    """Killed while the second job runs, once for good and once with Ctrl-C; then twice at the same time."""
    write_notebook(tmp_path / "11_nb.ipynb", STEP, parameters="steps = 0  # which")
    command = [sys.executable, "-c", RUN, str(tmp_path)]

    def started(job):
        path = tmp_path / f"started-{job}"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    for number, sign in enumerate([signal.SIGKILL, signal.SIGINT], start=1):
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while len(started(2)) < number and run.poll() is None:
            time.sleep(0.05)
        run.send_signal(sign)
        assert run.wait(20) != 0
        assert len(started(2)) == number
    (tmp_path / "finish").touch()
    assert [run.wait(60) for run in [subprocess.Popen(command) for _ in range(2)]] == [0, 0]

    assert (len(started(1)), len(started(2))) == (1, 3), "what was done is not done again"
    until = time.monotonic() + 10  # who is killed takes a moment to end
    while any(map(is_running, started(1) + started(2))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, started(1) + started(2))), "a kernel is left"
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("*.json"))]
    assert [record["status"] for record in records] == ["ok", "ok"]
    executed = {path.stem for path in (tmp_path / "runs").glob("*.ipynb")}
    assert executed == {path.stem for path in (tmp_path / "runs").glob("*.json")}, "half a notebook is left"
