"""The commands as a person types them, with the executions left out."""

import pytest

from cs336_systems import __main__ as commands
from cs336_systems.workbook import batch, runs
from cs336_systems.workbook.execute import Outcome


@pytest.fixture
def folder(tmp_path, write_notebook, monkeypatch):
    """A workbook of two notebooks in place of the real one."""
    write_notebook(tmp_path / "11_one.ipynb", "print(steps)")
    write_notebook(tmp_path / "12_two.ipynb", "print(steps)")
    profiles = "cpu: [{notebook: 11_one}]\ngpu: [{notebook: 12_two}]\nmulti-gpu: []"
    (tmp_path / "batch.yaml").write_text(profiles)
    monkeypatch.setattr(batch, "NOTEBOOKS", tmp_path)
    return tmp_path


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        commands.main(["--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("run", "list", "card", "notebooks", "figures", "index"))


def test_list_shows_parameters_with_defaults_and_comments(folder, capsys):
    assert commands.main(["list"]) == 0
    assert "    context_lengths = [32, 64]  # lengths of the sequences" in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "planned"), [(0, "11_one"), (1, "12_two"), (2, "")])
def test_the_profile_is_what_the_machine_has(folder, monkeypatch, capsys, gpus, planned):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert commands.main(["run", "--dry-run"]) == 0
    assert capsys.readouterr().out.strip() == planned


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "gpu"], "error: profile 'gpu' needs 1 GPUs, here: 0; allowed: cpu"),
        (["--profile", "multi-gpu"], "error: profile 'multi-gpu' needs 2 GPUs, here: 0; allowed: cpu"),
        (["--jobs", "0"], "error: --jobs 0; allowed: 1 or more"),
        (["--only", "99"], "error: unknown notebook '99'; allowed: 11_one, 12_two"),
        (["-p", "stpes=1"], "error: -p stpes=1: unknown parameter 'stpes'"),
        (["-p", "device=cuda"], "error: 11_one: device 'cuda' without a GPU; allowed: auto, cpu"),
    ],
)
def test_what_is_refused(folder, no_gpu, capsys, arguments, said):
    assert commands.main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_notebooks_at_once_are_refused_on_a_gpu(folder, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert commands.main(["run", "--jobs", "2"]) == 2
    assert "--jobs 2; allowed: 1, for notebooks that share a GPU spoil" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("error", 1)])
def test_run_ends_with_a_summary_and_tells_failure_by_its_exit_code(
    folder, no_gpu, monkeypatch, capsys, tmp_path, status, code
):
    reason = "cell [1]: Bad: luck" if status == "error" else ""
    monkeypatch.setattr(runs, "execute", lambda *_, **__: Outcome(status, reason, 1.0, 50.0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert commands.main(["run", "--output", str(tmp_path / "runs")]) == code
    said = capsys.readouterr().out
    assert "11_one" in said
    assert status in said
    assert reason in said
    (index,) = (tmp_path / "runs").glob("*/index.html")
    assert said.rstrip().endswith(str(index))


def test_ctrl_c_says_how_to_go_on(folder, no_gpu, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_run_jobs", interrupted)
    assert commands.main(["run"]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_index_without_runs_says_so(tmp_path, capsys):
    assert commands.main(["index", "--output", str(tmp_path)]) == 2
    assert "no executed notebooks" in capsys.readouterr().err


@pytest.mark.parametrize("status", ["ok", "error"])
def test_notebooks_are_rewritten_tidy_and_only_when_they_ran(folder, monkeypatch, status):
    def execute(source, output, parameters):
        text = source.read_text().replace('"metadata": {}', '"metadata": {"papermill": {"duration": 1}}')
        output.write_text(text.replace("print(steps)", "print(steps)  # executed"))
        return Outcome(status, "", 1.0, 50.0)

    monkeypatch.setattr(commands, "execute", execute)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CS336_FIGURES", "elsewhere")
    before = {path: path.read_text() for path in folder.glob("*.ipynb")}
    assert commands.main(["notebooks", "11"]) == (status != "ok")
    assert (folder / "12_two.ipynb").read_text() == before[folder / "12_two.ipynb"]
    after = (folder / "11_one.ipynb").read_text()
    assert ("# executed" in after) == (status == "ok")
    assert "papermill" not in after


def test_the_start_is_executed_after_the_notebooks_it_quotes(folder, monkeypatch, write_notebook):
    write_notebook(folder / "00_start_here.ipynb", "print(steps)")
    executed, renewed = [], []

    def execute(source, output, parameters):
        executed.append(source.stem)
        return Outcome("error", "not really executed", 1.0, 50.0)

    monkeypatch.setattr(commands, "execute", execute)
    monkeypatch.setattr("cs336_systems.workbook.map.renew_map", renewed.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CS336_FIGURES", "elsewhere")
    commands.main(["notebooks"])
    commands.main(["notebooks", "12"])
    assert executed == ["11_one", "12_two", "00_start_here", "12_two", "00_start_here"]
    assert renewed == [folder, folder]
