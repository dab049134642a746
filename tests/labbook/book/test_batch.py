"""The plan: what batch.yaml says becomes jobs, and everything wrong with it is said before anything runs."""

import re

import pytest

from labbook.book import batch, notebooks
from labbook.book.batch import BatchError, Job, plan

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
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path)
    for name in ("11_one", "12_two", "13_three"):
        write_notebook(tmp_path / f"{name}.ipynb", "print(steps)")
    (tmp_path / "batch.yaml").write_text(YAML)
    (tmp_path / "parameters.yaml").write_text(
        "every notebook:\n  model_size: {words: [tiny, small, large, xl]}"
    )
    return tmp_path


def lines(jobs):
    return [f"{job.notebook.stem} {job.line()}".strip() for job in jobs]


def test_a_grid_becomes_every_combination_and_a_profile_includes_another(folder):
    assert lines(plan("cpu")) == [
        "11_one",
        "12_two steps=5 model_size=tiny context_lengths=[32]",
        "12_two steps=5 model_size=tiny context_lengths=[64, 128]",
        "12_two steps=5 model_size=small context_lengths=[32]",
        "12_two steps=5 model_size=small context_lengths=[64, 128]",
    ]
    assert lines(plan("multi-gpu")) == ["11_one model_size=large", "12_two"]


def test_only_takes_number_slug_name_or_path_and_adds_what_the_profile_lacks(folder):
    for word in ("11", "one", "11_one", "notebooks/11_one.ipynb"):
        assert lines(plan("gpu", only=[word])) == ["11_one model_size=large"]
    assert lines(plan("cpu", only=["13", "11"])) == ["11_one", "13_three"]


def test_overrides_replace_a_grid_or_make_one_where_there_is_the_parameter(folder, write_notebook):
    jobs = plan("cpu", only=["12"], overrides=["model_size=xl", "context_lengths=[8]"])
    assert lines(jobs) == ["12_two steps=5 model_size=xl context_lengths=[8]"]
    write_notebook(folder / "11_one.ipynb", parameters="value = 1  # a value")
    jobs = plan("cpu", overrides=["value=1", "value=2"])
    assert lines(jobs)[:2] == ["11_one value=1", "11_one value=2"]
    assert all("value" not in job.parameters for job in jobs[2:])


@pytest.mark.parametrize(
    ("options", "given", "allowed"),
    [
        ({"profile": "tpu"}, "'tpu'", "cpu, gpu, multi-gpu"),
        ({"only": ["99"]}, "'99'", "11_one, 12_two, 13_three"),
        ({"overrides": ["modle_size=xl"]}, "'modle_size'", "model_size"),
        ({"overrides": ["steps"]}, "'steps'", "steps"),
        ({"overrides": ["steps=many"]}, "11_one: steps is 'many'", "a whole number"),
        ({"overrides": ["model_size=huge"]}, "'huge'", "tiny, small"),
        ({"overrides": ["context_lengths=[128"]}, "context_lengths", "a list"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_allowed(folder, options, given, allowed):
    with pytest.raises(BatchError, match=f"{re.escape(given)}(.|\n)*allowed: .*{allowed}"):
        plan(**({"profile": "cpu"} | options))


@pytest.mark.parametrize(
    ("yaml", "named"),
    [
        ("cpu: [{notebook: 99_none}]", "99_none"),
        ("cpu: [{notebook: 11_one, parameters: {stpes: 1}}]", "stpes"),
        ("cpu: [{notebook: 11_one, grid: {steps: 1}}]", "'steps': '1'"),
        ("cpu: [{notebook: 11_one, gird: {steps: [1]}}]", "gird"),
        ("cpu: [11_one]", "11_one"),
        ("cpu: [{profile: cpu}]", "'cpu'"),
        ("cpu: {a: 1}", "cpu: 'a'; allowed"),
        ("cpu: [{notebook: 11_one, parameters: [steps]}]", "11_one.*a value each"),
        ("[11_one]", "batch.yaml holds no mapping"),
        ("cpu: [{notebook: 11_one, parameters: {steps: 1:30}}]", "steps is '1:30'"),
        ("cpu: [", "batch.yaml"),
        ("cpu: [{notebook: 11_one, grid: {a: [1]}}, {notebook: 12_two, grid: {b: [1]}}]", "'a'(.|\n)*'b'"),
    ],
)
def test_all_that_is_wrong_in_the_file_is_said_at_once(folder, yaml, named):
    (folder / "batch.yaml").write_text(yaml)
    with pytest.raises(BatchError, match=named):
        plan("cpu")


def test_a_damaged_notebook_is_named(folder):
    (folder / "12_two.ipynb").write_text("{")
    with pytest.raises(BatchError, match="12_two"):
        plan("cpu")


def test_names_of_jobs_are_short_file_names_that_never_clash(folder):
    notebook = folder / "11_one.ipynb"
    sets = [{}, {"steps": 1}, {"steps": "1"}, {"dtypes": ["a"]}, {"dtypes": ["b"]}, {"model_size": "a/b"}]
    names = [Job(notebook, parameters).name for parameters in sets]
    assert len(set(names)) == len(names)
    assert names[0] == "11_one"
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)


def test_the_workbooks_own_plan_holds():
    assert all(map(plan, batch.PROFILES))
