import numpy as np
import pandas as pd
import pytest

from cs336_systems.attention import kernel_digest
from labbook import answers
from labbook.answers import answer, claim, note_kernels, one, without_docstrings


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda markdown: shown.append(markdown.data))
    return shown


def test_an_answer_shows_its_text_and_every_claim_checked(shown):
    answer("b", "A forward takes 9.53 ms.", claim("so", np.bool_(True)), claim("9.53 ms < 10 ms", 9.53 < 10))
    (text,) = shown
    assert text.startswith("**(b)** A forward takes 9.53 ms.\n\n<details>")
    assert "<summary>2 claims checked</summary>" in text
    assert "✓ 9.53 ms &lt; 10 ms" in text


def test_a_claim_that_does_not_hold_is_named_and_nothing_is_shown(shown):
    claims = [claim("12.1 ms < 10 ms", False), claim("yes", True), claim("it is fast", np.bool_(False))]
    with pytest.raises(AssertionError, match=r"12\.1 ms < 10 ms; it is fast$"):
        answer("b", "Text.", *claims)
    assert shown == []


def test_only_a_truth_value_is_a_claim():
    with pytest.raises(TypeError, match=r"\.all\(\)"):
        claim("text", pd.Series([True]))


def test_rows_of_other_kernels_are_counted_by_their_sources(rows, shown):
    digests = [kernel_digest(), "0123456789ab", "0123456789ab", None, None, None]
    ours = rows.assign(implementation=["flash_triton"] * 5 + ["plain"], kernels=digests)
    note_kernels(ours, ours[:1])
    (text,) = shown
    for part in ("6 rows", " 4 ", "2 with 01234567", "2 with unrecorded", kernel_digest()[:8]):
        assert part in text
    shown.clear()
    current = rows.assign(implementation="flash_triton", kernels=kernel_digest())
    note_kernels(rows.assign(kernels=None), current)
    assert shown == []


SOURCE = '''
def area(r):
    """Docstring
    of two lines."""
    # A comment that stays.
    return 3 * r * r


class Shape:
    """Gone."""

    sides = "not a docstring"
'''


def test_of_the_source_that_is_shown_docstrings_leave_and_everything_else_stays():
    code = without_docstrings(SOURCE)
    assert "Docstring" not in code
    assert "Gone" not in code
    assert "# A comment that stays." in code
    namespace = {}
    exec(code, namespace)
    assert namespace["area"](2) == 12
    assert namespace["Shape"].sides == "not a docstring"


def test_the_one_row_is_found_and_none_or_several_are_refused(rows):
    assert one(rows, implementation="plain", context_length=512, pass_="forward")["p50_ms"] == 4.0
    assert one(rows.assign(dtype=[None, *["float32"] * 5]), dtype=None)["context_length"] == 256
    with pytest.raises(LookupError, match=r"0 rows of 6.*2048"):
        one(rows, implementation="plain", context_length=2048)
    with pytest.raises(LookupError, match=r"3 rows.*context_length"):
        one(rows, implementation="plain")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (answers.ms(0.0635), "63.5 µs"),
        (answers.ms(9.5312), "9.53 ms"),
        (answers.ms(1234.5), "1,234 ms"),
        (answers.ms(12345.0), "12.3 s"),
        (answers.gib(68.87), "68.9 MiB"),
        (answers.gib(16504.0), "16.1 GiB"),
        (answers.ratio_text(2.345), "2.35×"),
        (answers.percent(0.1234), "12.3%"),
        (answers.plural(2, "step"), "2 steps"),
        (answers.between([9.531, 81.2, 20.0]), "9.53 ms to 81.2 ms"),
        (answers.between([0.0983, 0.103]), "0.0983 ms to 0.103 ms"),
        (answers.between([512, 2048], answers.gib), "0.500 GiB to 2.00 GiB"),
        (answers.between([1.0, 1.001], answers.ratio_text), "1.00×"),
    ],
)
def test_figures_have_three_significant_digits_and_a_unit(text, expected):
    assert text == expected
