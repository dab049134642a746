import numpy as np
import pandas as pd
import pytest

from cs336_systems.report import answers
from cs336_systems.report.answers import answer, claim, one, pending


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda markdown: shown.append(markdown.data))
    return shown


def test_an_answer_names_its_deliverable(shown):
    answer("b", "A forward takes 9.53 ms.", True, np.bool_(True), claim("9.53 ms < 10 ms", 9.53 < 10))
    assert shown == ["**(b)** A forward takes 9.53 ms."]


def test_a_claim_that_does_not_hold_is_named_with_its_figures(shown):
    with pytest.raises(AssertionError, match=r"answer \(b\) does not hold: 12.1 ms < 10 ms; it is fast$"):
        answer("b", "Text.", claim("12.1 ms < 10 ms", False), True, claim("it is fast", np.bool_(False)))
    assert shown == []


def test_a_bare_claim_is_told_by_its_number_and_text(shown):
    with pytest.raises(AssertionError, match=r"claim 2 of: A forward takes 9\.53 ms"):
        answer("a", "A forward takes 9.53 ms.", True, False)


@pytest.mark.parametrize("value", [1, "yes", None, pd.Series([True])])
def test_only_a_truth_value_is_a_claim(value):
    with pytest.raises(TypeError, match="not a truth value"):
        answer("a", "Text.", value)


def test_a_pending_answer_says_what_is_missing(shown):
    pending("c", "no rows of h200 for benchmarking_script")
    assert shown == ["**(c)** *No answer yet: no rows of h200 for benchmarking_script.*"]


def test_the_one_row_is_found(rows):
    row = one(rows, implementation="eager", context_length=512, pass_="forward")
    assert row["p50_ms"] == 4.0


def test_an_empty_key_is_found_by_none(rows):
    assert one(rows.assign(dtype=[None, *["float32"] * 5]), dtype=None)["context_length"] == 256


def test_no_row_names_the_near_misses(rows):
    message = r"no row of 6 has implementation='eager', .*=2048; .* only context_length is 256, 512, 1024"
    with pytest.raises(LookupError, match=message):
        one(rows, implementation="eager", context_length=2048)


def test_several_rows_name_their_difference(rows):
    with pytest.raises(LookupError, match=r"3 rows have implementation='eager', one is .* context_length"):
        one(rows, implementation="eager")


def test_no_row_in_an_empty_frame(rows):
    with pytest.raises(LookupError, match="no row of 0 has implementation='eager'"):
        one(rows.iloc[:0], implementation="eager")


def test_a_key_that_is_no_column_is_refused(rows):
    with pytest.raises(ValueError, match="no column model_size"):
        one(rows, model_size="xl")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (answers.ms(0.0635), "63.5 µs"),
        (answers.ms(9.5312), "9.53 ms"),
        (answers.ms(1234.5), "1,230 ms"),
        (answers.ms(12345.0), "12.3 s"),
        (answers.gib(68.87), "68.9 MiB"),
        (answers.gib(16504.0), "16.1 GiB"),
        (answers.ratio_text(2.345), "2.35×"),
        (answers.percent(0.1234), "12.3%"),
        (answers.plural(1, "step"), "1 step"),
        (answers.plural(0, "step"), "0 steps"),
        (answers.plural(2, "pass", "passes"), "2 passes"),
        (answers.between([9.531, 81.2, 20.0]), "9.53 ms to 81.2 ms"),
        (answers.between([0.0983, 0.1031]), "98.3 µs to 103 µs"),
        (answers.between([0.0983, 2.5]), "98.3 µs to 2.50 ms"),
        (answers.between([1.0, 1.001], answers.ratio_text), "1.00×"),
    ],
)
def test_figures_have_three_significant_digits_and_a_unit(text, expected):
    assert text == expected
