"""Batches: the plan, checked before anything runs; what is done is not done again, a killed run continues."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from labbook.book import batch, execution, kernel, notebooks
from labbook.book.batch import BatchError, Job
from labbook.book.execution import Outcome, execute
from labbook.project import project

YAML = """
cpu:
  - notebook: 11_one
  - notebook: 12_two
    parameters: {steps: 005}
    grid: {model_size: [tiny, small], context_lengths: [[32], [064, 128]]}
gpu:
  - notebook: 11_one
    parameters: {model_size: large}
multi-gpu:
  - profile: gpu
  - notebook: 12_two
"""


@pytest.fixture
def folder(tmp_path, write_notebook, monkeypatch):
    monkeypatch.setattr(notebooks, "folder", lambda: tmp_path)
    for name in ("11_one", "12_two", "13_three"):
        write_notebook(tmp_path / f"{name}.ipynb", "print(steps)")
    (tmp_path / "batch.yaml").write_text(YAML)
    rules = "every notebook:\n  model_size: {words: [tiny, small, large, xl]}"
    (tmp_path / "parameters.yaml").write_text(rules)
    return tmp_path


def lines(jobs):
    return [f"{job.notebook.stem} {job.line()}".strip() for job in jobs]


def test_a_grid_becomes_every_combination_and_a_profile_includes_another(folder):
    assert lines(batch.jobs("cpu")) == [
        "11_one",
        "12_two steps=5 model_size=tiny context_lengths=[32]",
        "12_two steps=5 model_size=tiny context_lengths=[64, 128]",
        "12_two steps=5 model_size=small context_lengths=[32]",
        "12_two steps=5 model_size=small context_lengths=[64, 128]",
    ]
    assert lines(batch.jobs("multi-gpu")) == ["11_one model_size=large", "12_two"]


def test_only_takes_number_slug_name_or_path_and_adds_what_the_profile_lacks(
    folder, write_notebook
):
    for word in ("11", "one", "11_one", "notebooks/11_one.ipynb"):
        assert lines(batch.jobs("gpu", only=[word])) == ["11_one model_size=large"]
    assert lines(batch.jobs("cpu", only=["13", "11"])) == ["11_one", "13_three"]
    write_notebook(folder / "11_copy.ipynb")
    with pytest.raises(BatchError, match="'11'; allowed: 11_copy, 11_one"):
        batch.jobs("cpu", only=["11"])


def test_overrides_replace_a_grid_where_there_is_the_parameter(folder, write_notebook):
    jobs = batch.jobs("cpu", only=["12"], overrides=["model_size=xl", "context_lengths=[8]"])
    assert lines(jobs) == ["12_two model_size=xl context_lengths=[8]"]
    write_notebook(folder / "11_one.ipynb", parameters="value = 1  # a value")
    jobs = batch.jobs("cpu", overrides=["value=2"])
    assert lines(jobs)[0] == "11_one value=2"
    assert all("value" not in job.parameters for job in jobs[1:])


@pytest.mark.parametrize(
    ("options", "given", "allowed"),
    [
        ({"profile": "tpu"}, "'tpu'", "cpu, gpu, multi-gpu"),
        ({"only": ["99"]}, "'99'", "11_one, 12_two, 13_three"),
        ({"overrides": ["modle_size=xl"]}, "'modle_size'", "model_size"),
        ({"overrides": ["steps"]}, "steps is ''", "int"),
        ({"overrides": ["steps=many"]}, "11_one: steps is 'many'", "int"),
        ({"overrides": ["model_size=huge"]}, "'huge'", "tiny, small"),
        ({"overrides": ["context_lengths=[128"]}, "context_lengths", "a list"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_allowed(folder, options, given, allowed):
    with pytest.raises(BatchError, match=f"{re.escape(given)}(.|\n)*allowed: .*{allowed}"):
        batch.jobs(**({"profile": "cpu"} | options))


WRONG = {
    "cpu: [{notebook: 99_none}]": "99_none",
    "cpu: [{notebook: 11_one, parameters: {stpes: 1}}]": "stpes",
    "cpu: [{notebook: 11_one, gird: {steps: [1]}}]": "gird",
    "cpu: [{profile: cpu}]": "'cpu'",
    "cpu: [": "batch.yaml",
    "[cpu]": "batch.yaml .* no mapping",
    "cpu: [{notebook: 11_one, grid: [steps]}]": "'grid'",
    "cpu: [{notebook: 11_one, grid: {steps: []}}]": "'steps'",
    "cpu: [{notebook: 11_one, grid: {a: [1]}}, {notebook: 12_two, grid: {b: [1]}}]": "'a'(.|\n)*'b'",
}


@pytest.mark.parametrize("yaml", WRONG)
def test_all_that_is_wrong_in_the_file_is_said_at_once(folder, yaml):
    (folder / "batch.yaml").write_text(yaml)
    with pytest.raises(ValueError, match=WRONG[yaml]):
        batch.jobs("cpu")


def test_a_damaged_notebook_is_named(folder):
    (folder / "12_two.ipynb").write_text("{")
    with pytest.raises(BatchError, match="12_two"):
        batch.jobs("cpu")


def test_names_of_jobs_are_short_file_names_that_never_clash(folder):
    notebook = folder / "11_one.ipynb"
    sets = [
        {},
        {"steps": 1},
        {"steps": "1"},
        {"dtypes": ["a"]},
        {"dtypes": ["b"]},
        {"model_size": "a/b" * 99},
    ]
    names = [Job(notebook, parameters).name for parameters in sets]
    assert len(set(names)) == len(names)
    assert names[0] == "11_one"
    assert all(re.fullmatch(r"[\w.-]{,99}", name) for name in names)


def test_the_workbooks_own_plan_holds():
    assert all(map(batch.jobs, batch.PROFILES))


# Carried out.


@pytest.fixture
def jobs(tmp_path, write_notebook, monkeypatch):
    monkeypatch.setattr(notebooks, "folder", lambda: tmp_path)
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
        if "12" in source.stem:
            return Outcome("error", "cell [1]: Bad: <luck>", 1.25)
        return Outcome("ok")

    monkeypatch.setattr(batch, "execute", execute)
    return done


def test_a_failure_does_not_stop_the_rest_and_is_done_again(jobs, executed, tmp_path, capsys):
    folder = tmp_path / "runs"
    outcomes = batch.run_batch(jobs, folder)
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok"]
    assert executed == ["11_nb", "12_nb", "14_nb"]
    again = batch.run_batch(jobs, folder)
    assert executed[3:] == ["12_nb"]
    assert [again[0], again[2]] == [outcomes[0], outcomes[2]]
    batch.run_batch(jobs[:1], folder, force=True)
    assert executed[4:] == ["11_nb"]
    assert "steps=12\n    cell [1]: Bad: <luck>" in batch.summary(outcomes)


def test_some_run_at_once_and_the_last_comes_last(
    jobs, executed, tmp_path, write_notebook, monkeypatch
):
    execute = batch.execute
    both = threading.Barrier(2, timeout=30)

    def waiting(source, *arguments):
        if source.stem != "00_start_here":
            both.wait()
        return execute(source, *arguments)

    monkeypatch.setattr(batch, "execute", waiting)
    last = Job(write_notebook(tmp_path / "00_start_here.ipynb"))
    outcomes = batch.run_batch([last] + jobs[:2], tmp_path / "runs", at_once=2)
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok"]
    assert executed[2] == "00_start_here"


@pytest.mark.parametrize("gpus", ["", "0"])
def test_who_measures_waits_for_who_runs_a_cell_and_others_for_it(tmp_path, monkeypatch, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)

    def begin(hooks, source):
        """The thread that begins a cell in a kernel, alive while that waits."""
        cell = SimpleNamespace(raw_cell=source)
        thread = threading.Thread(target=hooks["pre_run_cell"], args=[cell], daemon=True)
        thread.start()
        thread.join(0.5)
        return thread

    one, two = {}, {}
    for hooks in (one, two):
        events = SimpleNamespace(register=hooks.__setitem__)
        lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
        kernel.take_turns(SimpleNamespace(events=events), lock)
    measure = "page.measure('times', cases, setup)"
    step, measuring = begin(one, "x = 1"), begin(two, measure)
    assert (step.is_alive(), measuring.is_alive()) == (False, True)
    one["post_run_cell"](None)
    measuring.join(30)
    step = begin(one, "x = 2")
    assert (step.is_alive(), measuring.is_alive()) == (True, False)
    two["post_run_cell"](None)
    step.join(30)
    assert not step.is_alive()
    one["post_run_cell"](None)
    # To show what it has measured, a kernel waits where both want the same cores.
    assert not begin(one, measure).is_alive()
    assert begin(two, "page.figure(chart, 'times')").is_alive() == (not gpus)


def test_what_cannot_run_is_skipped_with_its_reason_and_the_last_is_never_done(
    jobs, executed, tmp_path, write_notebook
):
    jobs[1:] = [
        Job(write_notebook(tmp_path / f"{name}.ipynb")) for name in ("13_nb", "00_start_here")
    ]
    outcomes = batch.run_batch(jobs, tmp_path / "runs")
    assert [outcome.status for outcome in outcomes] == ["ok", "skipped", "ok"]
    assert "no_such_package" in batch.summary(outcomes)
    batch.run_batch(jobs, tmp_path / "runs")
    assert executed == ["11_nb", "00_start_here", "00_start_here"]


def edit(old, new):
    return lambda job, output: job.notebook.write_text(job.notebook.read_text().replace(old, new))


CHANGES = {
    "its cells": edit("print(", "print(2 * "),
    "parameter rate": edit("rate = 0.5", "rate = 0.25"),
    "its notebook is gone": lambda job, output: output.unlink(),
}


@pytest.mark.parametrize("why", CHANGES)
def test_what_changed_is_done_again_once_and_a_line_says_why(jobs, executed, tmp_path, capsys, why):
    batch.run_batch(jobs[:1], tmp_path / "runs")
    CHANGES[why](jobs[0], tmp_path / "runs" / f"{jobs[0].name}.ipynb")
    for _ in range(2):
        batch.run_batch(jobs[:1], tmp_path / "runs")
        assert executed == ["11_nb", "11_nb"]
    said = capsys.readouterr().out
    assert "again: 11_nb steps=11: " in said
    assert why in said


def test_a_job_whose_rows_are_gone_is_done_again(jobs, executed, tmp_path, monkeypatch):
    counts = Counter({"a run": 2})
    monkeypatch.setattr(batch, "run_counts", lambda slug, machine: counts)
    batch.run_batch(jobs[:1], tmp_path / "runs")
    counts["another run"] = 3
    batch.run_batch(jobs[:1], tmp_path / "runs")
    assert executed == ["11_nb"]
    counts.clear()
    batch.run_batch(jobs[:1], tmp_path / "runs")
    assert executed == ["11_nb", "11_nb"]


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
        # A zombie has ended, and waits for init.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
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
        assert run.wait(100) != 0
        assert len(started(2)) == number
    (tmp_path / "finish").touch()
    assert [run.wait(200) for run in [subprocess.Popen(command) for _ in range(2)]] == [0, 0]

    assert (len(started(1)), len(started(2))) == (1, 3), "what was done is not done again"
    until = time.monotonic() + 10  # who is killed takes a moment to end
    while any(map(is_running, started(1) + started(2))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, started(1) + started(2))), "a kernel is left"
    records = list((tmp_path / "runs").glob("*.json"))
    assert [json.loads(path.read_text())["status"] for path in records] == ["ok", "ok"]
    executed = {path.stem for path in (tmp_path / "runs").glob("*.ipynb")}
    assert executed == {path.stem for path in records}, "half a notebook is left"


# One notebook in a process of its own: how it can end, that nothing stays.


def test_parameters_folder_and_interpreter(tmp_path, write_notebook, monkeypatch):
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"  # the user's, not to be chosen
    kernel.parent.mkdir(parents=True)
    kernel.write_text('{"argv": ["false"], "display_name": "mine", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    code = "import os, sys\nprint(steps, os.getcwd(), sys.executable, 'labbook.book.kernel' in sys.modules)"
    (tmp_path / "there").mkdir()
    source = write_notebook(tmp_path / "there" / "01_a.ipynb", code)
    outcome = execute(source, tmp_path / "out.ipynb", {"steps": 7})
    assert (outcome.status, outcome.reason) == ("ok", "")
    printed = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-1].outputs[0].text
    assert printed == f"7 {source.parent} {sys.executable} True\n"
    assert list(tmp_path.glob(".*")) == []


def test_an_error_is_one_line_and_the_notebook_is_kept(tmp_path, write_notebook):
    source = write_notebook(
        tmp_path / "01_a.ipynb", "print('before')", "raise ValueError('two\\nlines')"
    )
    outcome = execute(source, tmp_path / "out.ipynb", {})
    assert (outcome.status, outcome.reason) == ("error", "cell [3]: ValueError: two lines")
    assert "before" in (tmp_path / "out.ipynb").read_text()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "died"),
        ("import sys; sys.exit(0)", "it ended before its last line: sys.exit(0)?"),
        ("import os, time; os.kill(os.getppid(), 9); time.sleep(9)", "killed by SIGKILL, perhaps"),
    ],
)
def test_what_ends_half_way_is_an_error(tmp_path, write_notebook, code, said):
    source = write_notebook(tmp_path / "01_a.ipynb", f"{code}\nprint('measured')")
    outcome = execute(source, tmp_path / "out.ipynb", {})
    assert outcome.status == "error"
    assert said in outcome.reason


def test_who_was_left_alone_executes_nothing():
    with pytest.raises(psutil.NoSuchProcess):
        execution._main("", "", {}, 2**30)  # no process has such a number


def test_a_notebook_runs_with_other_parameters(tmp_path, monkeypatch):
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path))
    (path,) = project().notebooks.glob("13_*.ipynb")
    outcome = execute(path, tmp_path / "out.ipynb", {"value": 0.02, "count": 500})
    assert outcome.status == "ok", outcome.reason
    # The picture of the handout's sum is left alone.
    pictures = tmp_path.glob("*/*/error.png")
    assert [path.parts[-3] in project().committed for path in pictures] == [False]
