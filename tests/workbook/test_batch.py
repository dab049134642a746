"""The plan: what batch.yaml says becomes jobs, and everything wrong with it is said before anything runs."""

import re

import pytest

from cs336_systems.workbook import batch
from cs336_systems.workbook.batch import BatchError, Job, fingerprint, plan

YAML = """
cpu:
  - notebook: 11_one
  - notebook: 12_two
    parameters: {steps: 5}
    grid: {model_size: [tiny, small], context_lengths: [[32], [64, 128]]}
gpu:
  - notebook: 11_one
    parameters: {model_size: large}
multi-gpu:
  - profile: gpu
  - notebook: 12_two
"""


@pytest.fixture
def folder(tmp_path, write_notebook):
    for name in ("11_one", "12_two", "13_three"):
        write_notebook(tmp_path / f"{name}.ipynb", "print(steps)")
    (tmp_path / "batch.yaml").write_text(YAML)
    return tmp_path


def lines(jobs):
    return [f"{job.notebook.stem} {job.line()}".strip() for job in jobs]


def test_a_grid_becomes_every_combination(folder):
    assert lines(plan("cpu", folder=folder)) == [
        "11_one",
        "12_two steps=5 model_size=tiny context_lengths=[32]",
        "12_two steps=5 model_size=tiny context_lengths=[64, 128]",
        "12_two steps=5 model_size=small context_lengths=[32]",
        "12_two steps=5 model_size=small context_lengths=[64, 128]",
    ]


def test_a_profile_includes_another(folder):
    assert lines(plan("multi-gpu", folder=folder)) == ["11_one model_size=large", "12_two"]


@pytest.mark.parametrize("word", ["11", "one", "11_one", "notebooks/11_one.ipynb"])
def test_only_takes_number_slug_name_or_path(folder, word):
    assert lines(plan("gpu", only=[word], folder=folder)) == ["11_one model_size=large"]


def test_only_runs_a_notebook_outside_the_profile_with_its_defaults(folder):
    assert lines(plan("cpu", only=["13", "11"], folder=folder)) == ["11_one", "13_three"]


def test_an_override_replaces_the_grid_and_leaves_no_job_twice(folder):
    jobs = plan("cpu", only=["12"], overrides=["model_size=xl", "context_lengths=[8]"], folder=folder)
    assert lines(jobs) == ["12_two steps=5 model_size=xl context_lengths=[8]"]


def test_an_override_given_twice_is_a_grid(folder):
    jobs = plan("cpu", only=["11"], overrides=["steps=1", "steps=2"], folder=folder)
    assert lines(jobs) == ["11_one steps=1", "11_one steps=2"]


def test_an_override_reaches_only_the_notebooks_that_have_the_parameter(folder, write_notebook):
    write_notebook(folder / "11_one.ipynb", parameters="value = 1  # a value")
    jobs = plan("cpu", overrides=["value=2"], folder=folder)
    assert lines(jobs)[0] == "11_one value=2"
    assert all("value" not in job.parameters for job in jobs[1:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profile": "tpu"}, "profile 'tpu' is unknown; allowed: cpu, gpu, multi-gpu"),
        ({"only": ["99"]}, "unknown notebook '99'; allowed: 11_one, 12_two, 13_three"),
        ({"overrides": ["modle_size=xl"]}, "-p modle_size=xl: unknown parameter 'modle_size'; allowed: con"),
        ({"overrides": ["steps"]}, "-p steps: unknown parameter 'steps'"),
        ({"overrides": ["steps=many"]}, "11_one: steps is 'many'; allowed: a whole number, like 3"),
        ({"overrides": ["model_size=huge"]}, "11_one: model size 'huge' is not in edition 2025"),
        ({"overrides": ["context_lengths=[128"]}, "allowed: a list"),
    ],
)
def test_what_cannot_be_is_refused(folder, options, said):
    with pytest.raises(BatchError, match=re.escape(said)):
        plan(**({"profile": "cpu", "folder": folder} | options))


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("cpu: [{notebook: 99_none}]", "batch.yaml, cpu: unknown notebook '99_none'; allowed: 11_one"),
        ("cpu: [{notebook: 11_one, parameters: {stpes: 1}}]", "11_one: unknown parameter 'stpes'"),
        ("cpu: [{notebook: 11_one, grid: {steps: 1}}]", "grid is {'steps': 1}; allowed: a list of"),
        ("cpu: [{notebook: 11_one, gird: {steps: [1]}}]", "allowed: notebook with parameters and grid"),
        ("cpu: [11_one]", "allowed: notebook with parameters and grid"),
        ("cpu: [{profile: cpu}]", "profile 'cpu' includes itself"),
        ("cpu: {}", "allowed: profiles"),
        ("cpu: [", "batch.yaml cannot be read"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(folder, yaml, said):
    (folder / "batch.yaml").write_text(yaml)
    with pytest.raises(BatchError, match=re.escape(said)):
        plan("cpu", folder=folder)


def test_every_error_is_said_at_once(folder):
    (folder / "batch.yaml").write_text(
        "cpu: [{notebook: 11_one, parameters: {a: 1}}, {notebook: 12_two, parameters: {b: 1}}]"
    )
    with pytest.raises(BatchError, match=r"'a'(.|\n)*'b'"):
        plan("cpu", folder=folder)


def test_a_notebook_refuses_what_papermill_lets_through(folder, monkeypatch):
    monkeypatch.setattr(batch, "NOTEBOOKS", folder)
    batch.check_parameters("one", {"steps": 5, "np": object(), "context_lengths": [64]})
    with pytest.raises(BatchError, match=r"context_lengths is 64; allowed: a(.|\n)*steps is '5'; a"):
        batch.check_parameters("one", {"steps": "5", "context_lengths": 64, "np": object()})


def test_a_damaged_notebook_is_named(folder):
    (folder / "12_two.ipynb").write_text("{")
    with pytest.raises(BatchError, match=r"12_two\.ipynb cannot be run"):
        plan("cpu", folder=folder)


def test_names_of_jobs_are_short_file_names_that_never_clash(folder):
    notebook = folder / "11_one.ipynb"
    sets = [{}, {"steps": 1}, {"steps": "1"}, {"dtypes": ["a"]}, {"dtypes": ["b"]}, {"model_size": "a/b"}]
    names = [Job(notebook, parameters).name for parameters in sets]
    assert len(set(names)) == len(names)
    assert names[0] == "11_one"
    assert names[1].startswith("11_one-1-")
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)


def test_the_fingerprint_changes_with_what_is_measured(folder, write_notebook, monkeypatch):
    job = Job(folder / "11_one.ipynb")
    before = fingerprint(job)
    assert fingerprint(Job(folder / "11_one.ipynb", {"steps": 1})) != before
    write_notebook(folder / "11_one.ipynb", "print(steps + 1)")
    assert fingerprint(job) != before
    write_notebook(folder / "11_one.ipynb", "print(steps)")
    assert fingerprint(job) == before
    monkeypatch.setattr(batch.importlib.metadata, "version", lambda package: "99")
    assert fingerprint(job) != before


def test_the_fingerprint_changes_with_the_library_but_not_with_what_runs_it(folder, tmp_path, monkeypatch):
    library = tmp_path / "library"
    (library / "notebook").mkdir(parents=True)
    monkeypatch.setattr(batch, "__file__", str(library / "batch.py"))
    job = Job(folder / "11_one.ipynb")
    before = fingerprint(job)
    for name in ("batch.py", "runs.py", "notebook/pages.py"):
        (library / name).write_text("changed")
    assert fingerprint(job) == before
    (library / "model.py").write_text("changed")
    assert fingerprint(job) != before


def test_the_workbooks_own_plan_holds_for_every_profile():
    for profile in batch.PROFILES:
        assert plan(profile)
