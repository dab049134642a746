"""What a notebook starts from: bad parameters refused, rows and figures in their folders, lines to read."""

import pytest

from labbook import Page, Step, grid, lines, runs
from labbook.book.notebooks import BatchError

SLUG = "mixed_precision_accumulation"
ROW = {"accumulation": "float32 += float16", "steps": 1000, "total": 10.0}


pytestmark = pytest.mark.usefixtures("figures", "measured_cards")


@pytest.fixture
def page():
    return Page(SLUG, {"reference": "h200", "value": 0.01, "unrelated": object()})


def test_bad_parameters_are_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(BatchError, match="'h300'"):
        Page(SLUG, {"reference": "h300"})
    assert list(tmp_path.iterdir()) == []


def test_rows_are_saved_as_this_machines_and_a_line_is_printed_for_each(page, capsys):
    failed = {"accumulation": "other", "steps": 3, "status": "skipped", "reason": "no such number"}
    page.save(iter([ROW, failed]), "accumulation")
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].startswith("float32 += float16: ")
    assert lines[1] == "other: skipped (no such number)"
    page.save([failed], "accumulation")
    assert capsys.readouterr().out == "", "it says nothing new"
    mine = page.rows("accumulation")
    assert set(mine["machine"]) == {page.card.slug}
    assert sorted(mine["accumulation"]) == ["float32 += float16", "other"]
    assert set(page.reference_rows("accumulation")["machine"]) == {"h200"}


def test_reports_stand_folded_beside_the_reference(page, shown):
    ours = page.reference_rows("accumulation")
    theirs = ours.assign(total=2 * ours["total"], gpu="another card")
    page.beside_published(theirs, ["accumulation", "steps"], "total", ours)
    (table,) = shown
    start = "<details><summary>Beside public reports: total, theirs over ours</summary>"
    html = table["text/html"]
    assert html.startswith(start)
    assert html.count("2.00") == len(ours)
    assert html.count("another card") == len(ours)


def test_rows_about_a_model_name_it_with_its_edition(page):
    theirs = page.reference_rows("model_times", "benchmarking_script")
    named = theirs["model_size"] + " (" + theirs["edition"].astype(str) + ")"
    assert theirs["model"].tolist() == named.tolist()
    assert "model" not in page.reference_rows("accumulation")


def test_figures_lie_with_the_machine_whose_rows_they_show(page, tmp_path):
    figure = lines(page.reference_rows("accumulation"), "steps", "total", "accumulation")
    assert page.figure(figure, "one") is figure
    page.figure(figure, "two", here=True)
    assert (tmp_path / "h200" / SLUG / "one.png").read_bytes() == figure.png
    assert (tmp_path / page.card.slug / SLUG / "two.png").read_bytes() == figure.png


SAVING = "from cs336_systems.training.steps import PASSES as choose\npage.save(choose(rows), 'accumulation')"


def test_a_page_names_folded_what_has_changed_since_its_rows_were_measured(monkeypatch, shown):
    changed = ["model.py", "functional.py"]
    monkeypatch.setattr("labbook.page.provenance", lambda *_: ("two files have changed", changed))
    Page(SLUG, {})
    text = "<details><summary>two files have changed</summary>model.py, functional.py</details>"
    assert [each["text/html"] for each in shown] == [text]


def test_rows_of_the_running_cell_are_on_record_until_it_changes():
    executed = ["", "value = 3", SAVING]
    page = Page(SLUG, {"value": 0.01, "In": executed})
    page.save([ROW], "accumulation")
    assert len(page.on_record("accumulation")) == 1
    record = runs.load_run(page.card.slug, page.run.name)
    assert record.parameters == {"value": 0.01}
    assert "cs336_systems/training/steps.py" in record.code
    executed.append("value = 4")
    assert len(page.on_record("accumulation")) == 0, "it saves nothing"
    executed.append(SAVING)
    assert len(page.on_record("accumulation")) == 1, "a parameter is no code"
    executed.append(SAVING.replace("choose(rows)", "choose(rows[:1])"))
    assert len(page.on_record("accumulation")) == 0


def test_a_sweep_continues_after_the_cases_on_record_and_measures_them_again_where_it_must(
    monkeypatch,
):
    page = Page(SLUG, {"In": ["", "page.measure('weighted_sum_times', cases, setup)"]})
    made = []
    cases = grid(
        implementation="eager", num_rows=[1, 2], d_model=4, dtype="float32", pass_="forward"
    )

    def setup(case):
        made.append(case.num_rows)
        return {"forward": Step(list, values=lambda: {"tables": {"accumulation": [ROW]}})}

    def measure(cases, steps=2):
        page.measure("weighted_sum_times", cases, setup, warmup_steps=0, steps=steps)
        return made

    assert measure(cases[:1]) == [1]
    assert measure(cases) == [1, 2]
    assert measure(cases, steps=3) == [1, 2, 1, 2], "with more steps"
    assert len(page.rows("weighted_sum_times")) == 2
    assert len(page.rows("accumulation")) == 1, "rows of another table"
    page.save([cases[1] | {"status": "oom"}], "weighted_sum_times")
    assert measure(cases, steps=3)[4:] == [2], "what failed may be right now"
    monkeypatch.setenv("LABBOOK_AGAIN", "1")
    assert measure(cases[:1], steps=3)[5:] == [1]
