"""The commands as a person types them, with the executions left out."""

import os
import subprocess
import sys

import pandas as pd
import pytest

from cs336_systems import __main__ as commands
from labbook.book import batch, runs
from labbook.book.execute import Outcome


@pytest.fixture
def folder(tmp_path, write_notebook, monkeypatch):
    """A workbook of two notebooks in place of the real one."""
    for name in ("11_one", "12_two", "00_start_here"):
        write_notebook(tmp_path / f"{name}.ipynb", "print(steps)")
    profiles = "cpu: [{notebook: 11_one}]\ngpu: [{notebook: 12_two}]\nmulti-gpu: []"
    (tmp_path / "batch.yaml").write_text(profiles)
    monkeypatch.setattr(batch, "NOTEBOOKS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path / "figures"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return tmp_path


def test_list_shows_parameters_with_defaults_and_comments(folder, capsys):
    assert commands.main(["list"]) == 0
    assert "edition = 2025  # edition of the assignment" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "cs336_systems", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize(("gpus", "planned"), [(0, "11_one"), (1, "12_two"), (2, "")])
def test_the_profile_is_what_the_machine_has(folder, monkeypatch, capsys, gpus, planned):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert commands.main(["run", "--dry-run"]) == 0
    assert capsys.readouterr().out.strip() == planned


@pytest.mark.parametrize(
    ("gpus", "arguments", "given", "allowed"),
    [
        (0, ["--profile", "gpu"], "'gpu'", "cpu"),
        (0, ["--jobs", "0"], "--jobs 0", "1 or more"),
        (1, ["--jobs", "2"], "--jobs 2", "1"),
        (0, ["--only", "99"], "'99'", "11_one, 12_two"),
        (0, ["-p", "stpes=1"], "'stpes'", "steps"),
        (0, ["-p", "device=cuda"], "'cuda'", "auto, cpu"),
    ],
)
def test_what_is_refused_before_anything_runs(folder, monkeypatch, capsys, gpus, arguments, given, allowed):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert commands.main(["run", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert given in said.partition("allowed:")[0]
    assert allowed in said.partition("allowed:")[2]


@pytest.mark.parametrize(("status", "reason"), [("ok", ""), ("error", "cell [1]: Bad: luck")])
def test_run_ends_with_a_summary_and_tells_failure_by_its_exit_code(
    folder, monkeypatch, capsys, status, reason
):
    monkeypatch.setattr(runs, "execute", lambda *_, **__: Outcome(status, reason, 1.0, 50.0))
    assert commands.main(["run", "--output", str(folder / "runs")]) == (status == "error")
    said = capsys.readouterr().out
    assert all(word in said for word in ("11_one", status, reason))
    (index,) = (folder / "runs").glob("*/index.html")
    assert said.rstrip().endswith(str(index))


def test_figures_are_where_the_command_was_given_and_looked_at_before_it_runs(folder, monkeypatch, capsys):
    """A notebook runs in another folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CS336_FIGURES", "mine")
    monkeypatch.setattr(runs, "execute", lambda *_, **__: Outcome("ok", "", 1.0, 50.0))
    run = ["run", "--output", str(folder / "runs")]
    assert commands.main(run) == 0
    assert os.environ["CS336_FIGURES"] == str(folder / "mine")
    monkeypatch.setattr(os, "access", lambda path, mode: "mine" not in str(path))
    assert commands.main(run) == 2
    assert "CS336_FIGURES" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(folder, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_batch", interrupted)
    assert commands.main(["run", "--output", str(folder / "runs")]) == 130
    assert "the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize("status", ["ok", "error"])
def test_notebooks_are_rewritten_tidy_only_when_they_ran_and_the_map_last(folder, monkeypatch, status):
    executed = []

    def execute(source, output, parameters):
        executed.append(source.stem)
        text = source.read_text().replace('"metadata": {}', '"metadata": {"papermill": {"duration": 1}}')
        output.write_text(text.replace("print(steps)", "print(steps)  # executed"))
        return Outcome(status, "", 1.0, 50.0)

    monkeypatch.setattr(commands, "execute", execute)
    monkeypatch.setattr("labbook.book.map.renew_map", lambda: executed.append("README"))
    before = (folder / "12_two.ipynb").read_text()
    assert commands.main(["notebooks", "11"]) == (status != "ok")
    assert executed == ["11_one", "00_start_here", "README"], "the maps quote the notebooks"
    assert (folder / "12_two.ipynb").read_text() == before
    after = (folder / "11_one.ipynb").read_text()
    assert ("# executed" in after) == (status == "ok")
    assert "papermill" not in after


def test_bench_saves_what_it_measures_and_measures_only_what_is_missing(folder, monkeypatch, capsys):
    from cs336_systems.bench import flash_sweep

    times = dict.fromkeys(("mean_ms", "p20_ms", "p50_ms", "p80_ms"), 1.0) | {"std_ms": 0.0, "steps": 3}
    size = {"protocol": "wall_clock", "num_heads": 1, "batch_size": 1, "is_causal": True, "dtype": "bfloat16"}
    row = {"implementation": "sdpa", "context_length": 64, "d_head": 16, "pass": "forward"} | size | times
    monkeypatch.setattr(flash_sweep, "protocol_cells", lambda *_: ["cell"])
    monkeypatch.setattr(flash_sweep, "missing", lambda cells, rows: cells if rows.empty else [])
    monkeypatch.setattr(flash_sweep, "time_cells", lambda cells: [[row] for _ in cells])
    for measured in (1, 0):
        assert commands.main(["bench", "grid"]) == 0
        assert f"{measured} of them to measure" in capsys.readouterr().out
    (table,) = (folder / "figures").glob("*/flash_benchmarking/flash_times.csv")
    assert pd.read_csv(table)["p50_ms"].tolist() == [1.0]


@pytest.mark.parametrize("arguments", [["no-protocol"], ["grid", "--implementations", "nothing"]])
def test_bench_refuses_what_it_does_not_know(folder, capsys, arguments):
    assert commands.main(["bench", *arguments]) == 2
    assert arguments[-1] in capsys.readouterr().err
