import numpy as np
import pandas as pd
import pytest

from labbook import answers
from labbook.answers import answer, claim, one, solution, without_docstrings


@pytest.mark.parametrize(
    "show", [lambda *what: answer("b", *what), lambda *what: solution(2, *what)]
)
def test_a_text_is_shown_with_every_claim_checked_or_not_at_all(show, shown):
    show("It takes 9.53 ms.", claim("so", np.bool_(True)), claim("9.53 ms < 10 ms", 9.53 < 10))
    assert all(
        part in shown[0].data for part in ("It takes 9.53 ms.", "2 claims", "✓ 9.53 ms &lt; 10 ms")
    )
    with pytest.raises(AssertionError, match=r"12\.1 ms < 10 ms; it is fast$"):
        show(
            "Text.",
            claim("12.1 ms < 10 ms", False),
            claim("yes", True),
            claim("it is fast", np.bool_(False)),
        )
    assert len(shown) == 1


def test_only_a_truth_value_is_a_claim():
    with pytest.raises(TypeError, match=r"\.all\(\)"):
        claim("text", pd.Series([True]))


def test_of_the_source_that_is_shown_docstrings_leave_and_everything_else_stays():
    kept = [
        "class A:",
        '    b = "no docstring"',
        "    def c():",
        "        # A comment.",
        "        return",
    ]
    source = kept[:1] + ['    """One."""'] + kept[1:3]
    source += ['        """Two,', '        three."""'] + kept[3:]
    assert without_docstrings("\n".join(source)) == "\n".join(kept)


def test_the_one_row_is_found_and_none_or_several_are_refused(rows):
    assert one(rows, implementation="plain", context_length=512, pass_="forward")["p50_ms"] == 4.0
    assert one(rows.assign(dtype=[None] + ["float32"] * 5), dtype=None)["context_length"] == 256
    with pytest.raises(LookupError, match=r"0 rows of 6.*2048"):
        one(rows, implementation="plain", context_length=2048)
    with pytest.raises(LookupError, match=r"3 rows.*context_length"):
        one(rows, implementation="plain")


def test_figures_have_three_significant_digits_and_a_unit():
    times = [answers.ms(ms) for ms in (0.0635, 9.5312, 1234.5, 12345.0)]
    assert times == ["63.5 µs", "9.53 ms", "1,234 ms", "12.3 s"]
    assert [answers.gib(mib) for mib in (68.87, 16504.0)] == ["68.9 MiB", "16.1 GiB"]
    assert answers.plural(2000, "step") == "2,000 steps"
    assert answers.between([0.0983, 0.103]) == "0.0983 ms to 0.103 ms"
    assert answers.between([512, 2048], answers.gib) == "0.500 GiB to 2.00 GiB"
    assert answers.between([1.0, 1.001], answers.ratio_text) == "1.00×"
