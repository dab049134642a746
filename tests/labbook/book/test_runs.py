"""Batches: what is done is not done again, what fails does not stop the rest, and a killed run continues."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import psutil
import pytest

from labbook.book import runs
from labbook.book.batch import BatchError, Job
from labbook.book.execute import Outcome
from labbook.machine import MachineCard
from labbook.rows import load_rows, save_rows

RATES = {"float32": 1.0}
CARD = MachineCard("cpu-test", "none", None, None, "a CPU", 2, 8.0, "3", "2", "3", RATES, 1.0, "now")


@pytest.fixture
def jobs(tmp_path, write_notebook):
    paths = {n: tmp_path / f"{n}_nb.ipynb" for n in (11, 12, 13)}
    return [Job(write_notebook(path, "print(steps)"), {"steps": n}) for n, path in paths.items()]


@pytest.fixture
def executed(monkeypatch):
    """Executions without a kernel: the list of what was executed; notebooks with 12 in their name fail."""
    done = []

    def execute(source, output, parameters, *, stop):
        done.append(source.stem)
        nbformat.write(nbformat.read(source, as_version=4), output)
        failed = source.stem.startswith("12")
        return Outcome("error" if failed else "ok", "cell [1]: Bad: <luck>" if failed else "", 1.25, 100.4)

    monkeypatch.setattr(runs, "execute", execute)
    return done


def test_a_failure_does_not_stop_the_rest_and_is_done_again(jobs, executed, tmp_path):
    folder = tmp_path / "runs" / "cpu-test"
    records = runs.run_batch(jobs, folder, CARD)
    assert [record.status for record in records] == ["ok", "error", "ok"]
    assert executed == ["11_nb", "12_nb", "13_nb"]
    again = runs.run_batch(jobs, folder, CARD)
    assert executed[3:] == ["12_nb"]
    assert [again[0], again[2]] == [records[0], records[2]]
    runs.run_batch(jobs[:1], folder, CARD, force=True)
    assert executed[4:] == ["11_nb"]


def test_a_page_that_cannot_be_made_is_a_warning_and_made_when_it_can(jobs, executed, tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    page = folder / f"{jobs[0].name}.html"
    runs.run_batch(jobs[:1], folder, CARD)
    assert page.exists()
    with monkeypatch.context() as lacking:
        lacking.setattr("nbconvert.HTMLExporter.from_filename", lambda *_: 1 / 0)
        records = runs.run_batch(jobs, folder, CARD, force=True)
        assert [record.status for record in records] == ["ok", "error", "ok"]
        assert "ZeroDivisionError" in records[0].reason
        assert records[0].reason in runs.summary(records)
        assert records[1].reason == "cell [1]: Bad: <luck>"
        assert not page.exists(), "the page of an earlier execution is left"
        lacking.setattr(runs, "execute", None)  # a notebook without a page is done
        assert runs.run_batch(jobs[:1], folder, CARD) == records[:1]
    again = runs.run_batch(jobs[:1], folder, CARD)
    assert (again[0].reason, page.exists()) == ("", True)
    assert runs.load_record(page.with_suffix(".json")) == again[0]


def test_what_cannot_run_is_skipped_with_its_reason_and_the_start_is_never_done(
    jobs, executed, tmp_path, monkeypatch, write_notebook
):
    jobs[2] = Job(write_notebook(tmp_path / "00_start_here.ipynb"))
    monkeypatch.setattr(runs, "why_not_here", lambda name: "needs a moon" if name == "12_nb" else "")
    records = runs.run_batch(jobs, tmp_path / "runs", CARD)
    assert [record.status for record in records] == ["ok", "skipped", "ok"]
    assert "needs a moon" in runs.summary(records)
    runs.run_batch(jobs, tmp_path / "runs", CARD)
    assert executed == ["11_nb", "00_start_here", "00_start_here"]


CHANGES = {
    "another notebook": lambda job, output: job.notebook.write_text(
        job.notebook.read_text().replace("print(", "print(2 * ")
    ),
    "no output": lambda job, output: output.unlink(),
    "a damaged record": lambda job, output: output.with_suffix(".json").write_text('{"notebook":'),
    "a foreign record": lambda job, output: output.with_suffix(".json").write_text('{"of": "another"}'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_done_again(jobs, executed, tmp_path, change):
    runs.run_batch(jobs[:1], tmp_path / "runs", CARD)
    CHANGES[change](jobs[0], tmp_path / "runs" / f"{jobs[0].name}.ipynb")
    runs.run_batch(jobs[:1], tmp_path / "runs", CARD)
    assert executed == ["11_nb", "11_nb"]


def test_files_index_and_summary(jobs, executed, tmp_path):
    folder = tmp_path / "runs" / "cpu-test"
    text = runs.summary(runs.run_batch(jobs, folder, CARD))
    assert text.splitlines()[1].split() == ["11_nb", "steps=11", "ok", "1.2", "100"]
    assert "cell [1]: Bad: <luck>" in text
    page = (folder / "index.html").read_text()
    assert all((folder / f"{job.name}.html").exists() and f'href="{job.name}.html"' in page for job in jobs)
    assert "<b>error</b>: cell [1]: Bad: &lt;luck&gt;" in page


def test_on_a_gpu_the_peak_is_taken_from_the_rows_just_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    gpu = dataclasses.replace(CARD, gpu="GPU", slug="gpu-test")
    row = {"machine": "gpu-test", "gpu": "GPU", "implementation": "eager", "d_model": 8, "dtype": "float32"}
    row |= dict.fromkeys(("mean_ms", "p20_ms", "p50_ms", "p80_ms"), 1.0)
    row |= {"pass": "forward", "std_ms": 0.0, "steps": 1}

    def save(**values):
        save_rows([row | values], "weighted_sum", "weighted_sum_times", machine="gpu-test")

    save(num_rows=1, peak_memory_mib=99.0, measured_at="2001-01-01T00:00:00Z")
    before = datetime.now(UTC)
    assert runs._gpu_memory_mib(gpu, before) is None
    for number in (2, 3):
        save(num_rows=number, peak_memory_mib=10.0 * number)
    assert runs._gpu_memory_mib(gpu, before) == 30
    folder = tmp_path / "gpu-test" / "weighted_sum"
    (folder / "empty.csv").touch()  # of a run killed before its first row
    (folder / "damaged.csv").write_text('measured_at,peak_memory_mib\n"2026,1')
    assert runs._gpu_memory_mib(gpu, before) == 30


def test_what_is_missing_is_said_before_anything_starts(jobs, executed, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="--output"):
        runs.run_batch(jobs, tmp_path / "file" / "runs", CARD)
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BatchError, match="ipykernel"):
        runs.run_batch(jobs, tmp_path / "runs", CARD)
    assert executed == []


SAVE = """\
import os, time
from labbook.rows import save_rows
row = {"accumulation": f"float{steps}", "steps": steps, "total": 1.0}
save_rows([row], "mixed_precision_accumulation", "accumulation", machine="cpu-test")
open(f"started-{steps}", "a").write(f"{os.getpid()}\\n")
time.sleep(60 if steps == 2 and not os.path.exists("finish") else 0)
"""
RUN = """\
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background hands on "ignore"
sys.path.insert(0, sys.argv[2])
from test_runs import CARD
from labbook.book import runs
from labbook.book.batch import Job
runs.fingerprint = lambda *_: "unchanged"
folder = Path(sys.argv[1])
runs.run_batch([Job(folder / "11_nb.ipynb", {"steps": n}) for n in (1, 2)], folder / "runs", CARD)
"""


def test_a_killed_run_continues_and_no_row_is_lost_or_doubled(tmp_path, write_notebook, monkeypatch):
    """Killed while the second job runs, once for good and once with Ctrl-C, and then left alone."""
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path / "figures"))
    write_notebook(tmp_path / "11_nb.ipynb", SAVE, parameters="steps = 0  # which")
    command = [sys.executable, "-c", RUN, str(tmp_path), str(Path(__file__).parent)]

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
    subprocess.run(command, check=True)

    assert (len(started(1)), len(started(2))) == (1, 3), "what was done is not done again"
    assert not any(psutil.pid_exists(pid) for pid in started(1) + started(2)), "a kernel is left"
    rows = load_rows("mixed_precision_accumulation", "cpu-test", "accumulation")
    assert sorted(rows["steps"]) == [1, 2]
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("*.json"))]
    assert [record["status"] for record in records] == ["ok", "ok"]
    notebooks = {path.stem for path in (tmp_path / "runs").glob("*.ipynb")}
    assert notebooks == {path.stem for path in (tmp_path / "runs").glob("*.json")}, "half a notebook is left"
