"""The commands as a person types them, with the executions left out."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from labbook.book import batch, commands, notebooks, site
from labbook.book.execution import Outcome
from labbook.files import write_record
from labbook.runs import Record


@pytest.fixture
def folder(tmp_path, write_notebook, monkeypatch, measured_cards):
    """A workbook of two notebooks in place of the real one, on a machine that is measured at once."""
    for name in ("11_one", "12_two", "00_start_here"):
        write_notebook(tmp_path / f"{name}.ipynb", "print(steps)")
    (tmp_path / "batch.yaml").write_text(
        "cpu: [{notebook: 11_one}]\ngpu: [{notebook: 12_two}]\n"
        "multi-gpu: []\nfour-gpus: [{notebook: 11_one}]"
    )
    (tmp_path / "book.yaml").write_text("last: [00_start_here]\nneeds: {no_such_package: [12_two]}")
    (tmp_path / "parameters.yaml").write_text("{}")
    monkeypatch.setattr(notebooks, "folder", lambda: tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path / "figures"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(
        commands, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count)
    )
    return tmp_path


@pytest.fixture
def outcome(monkeypatch):
    """How executions end, without any: outcome(status, reason). Nor is there a site."""
    monkeypatch.setattr(site, "build", lambda target, *_: target / "index.html")

    def set_outcome(*fields):
        monkeypatch.setattr(batch, "execute", lambda *_: Outcome(*fields))

    set_outcome("ok")
    return set_outcome


def command(*arguments) -> int:
    return commands.main(list(map(str, arguments)))


@pytest.mark.parametrize(
    ("gpus", "planned"), [(0, "42 s  11_one"), (1, "? s  12_two"), (2, "0 s"), (6, "42 s  11_one")]
)
def test_the_profile_is_what_the_machine_has_and_its_time_that_of_its_runs(
    folder, monkeypatch, capsys, gpus, planned
):
    record = Record("run", "one", "mine", "none", "2.15", "3.9")
    record.measured_at = ["2026-01-01T00:00:10Z", "2026-01-01T00:00:16Z"]
    for run in "12":  # killed, and resumed
        write_record(folder / f"figures/mine/runs/20260101-one-{run}.json", record)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(commands, "core_count", lambda: 1)  # so that none waits for another
    assert command("run", "--dry-run") == 0
    assert capsys.readouterr().out.strip().startswith(planned)


@pytest.mark.parametrize(
    ("option", "value"), [("--profile", "gpu"), ("--only", "99"), ("--job", "11_ome")]
)
def test_what_is_refused_before_anything_runs(folder, capsys, option, value):
    assert command("run", option, value) == 2
    assert f"'{value}'" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "reason"), [("ok", ""), ("error", "cell [1]: Bad: luck")])
def test_run_ends_with_a_summary_and_tells_failure_by_its_exit_code(
    folder, outcome, capsys, status, reason
):
    outcome(status, reason)
    assert command("run", "--output", folder / "runs", "--only", "11", "12") == (status == "error")
    said = capsys.readouterr().out
    assert all(word in said for word in ("11_one", status, reason, "no_such_package"))
    (machine,) = (folder / "runs").iterdir()
    assert said.rstrip().endswith(str(machine / "index.html"))


def test_a_site_that_cannot_be_made_is_a_warning(folder, outcome, monkeypatch, capsys):
    monkeypatch.setattr(site, "build", lambda *_: 1 / 0)
    assert command("run", "--output", folder / "runs", "--only", "11") == 0
    assert re.search(
        r"warning: \S+/index.html cannot be made: ZeroDivisionError: division by zero\n",
        capsys.readouterr().err,
    )


def test_a_cluster_gets_the_plan_and_a_command_for_one_job_of_it(
    folder, outcome, monkeypatch, capsys
):
    asked = []
    monkeypatch.setattr(
        "labbook.book.slurm.run_on_slurm", lambda *given, **_: asked.append(given[1]) or []
    )
    monkeypatch.chdir(folder)
    given = ["--cluster", "slurm", "--only", "11", "12", "-p", "steps=7", "--output", "runs"]
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "workbook", "run"] + given)
    assert command("run", *given) == 0
    assert asked[0][:4] == [sys.executable, "-m", "workbook", "run"]
    assert "--profile=cpu" in asked[0]
    monkeypatch.chdir("/")
    name = batch.jobs("cpu", only=["11"], overrides=["steps=7"])[0].name
    assert command(*asked[0][3:], name) == 0
    assert [path.stem for path in (folder / "runs").glob("*/*.json")] == [name]


def test_list_shows_parameters_with_defaults_and_comments(capsys):
    assert command("list") == 0
    assert "edition = 2025  # " in capsys.readouterr().out


def test_figures_are_where_the_command_was_given_and_looked_at_first(
    folder, outcome, monkeypatch, capsys, measured_cards
):
    """A notebook runs in another folder. The machine's card is there, too."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LABBOOK_FIGURES", "mine")
    assert command("run", "--output", folder / "runs") == 0
    assert os.environ["LABBOOK_FIGURES"] == str(folder / "mine")
    assert command("run", "--output", folder / "runs", "--remeasure-card") == 0
    assert len(measured_cards) == 2
    monkeypatch.setattr(os, "access", lambda path, mode: "mine" not in str(path))
    assert command("run", "--output", folder / "runs") == 2
    assert "LABBOOK_FIGURES" in capsys.readouterr().err
    monkeypatch.setenv("LABBOOK_PROJECT", "nowhere")
    assert command("run") == 2


def test_ctrl_c_says_how_to_go_on(folder, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "run_batch", interrupted)
    assert command("run", "--output", folder / "runs") == 130
    assert "the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize("status", ["ok", "error"])
def test_notebooks_are_rewritten_tidy_only_when_they_ran_and_the_map_last(
    folder, monkeypatch, status
):
    executed = []

    def execute(source, output, parameters):
        executed.append(source.stem)
        text = source.read_text().replace(
            '"metadata": {}', '"metadata": {"papermill": {"duration": 1}}'
        )
        output.write_text(text.replace("print(steps)", "print(steps)  # executed"))
        return Outcome(status)

    monkeypatch.setattr(batch, "execute", execute)
    before = (folder / "12_two.ipynb").read_text()
    assert command("notebooks", "11") == (status != "ok")
    assert executed == ["11_one", "00_start_here"], "the map quotes the notebooks"
    assert (folder / "12_two.ipynb").read_text() == before
    after = (folder / "11_one.ipynb").read_text()
    assert ("# executed" in after) == (status == "ok")
    assert "papermill" not in after
