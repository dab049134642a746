"""There is no more to read than the budgets allow, and tokens are counted alike on every Python."""

import budgets
import pytest
from tokens import Count, count, long_statements, starred_displays

LIMITS = budgets.limits()
PROGRAM = '''
"""A docstring is free."""
def greet(name: str) -> str:
    # So is a comment.
    return f"hello {name!r:>{len(name)}} and {f'{name}'}"  # here, too
'''
STARRED = "f(*a, **b)\nx, *y = a\n[*a, 1]\n(*a,)\n{**b}\n{*a}"


@pytest.mark.parametrize("name", LIMITS["totals"])
def test_totals(name):
    limit, target = LIMITS["totals"][name]
    lists = {"long statements": long_statements, "starred displays": starred_displays}
    places = budgets.places(lists[name]) if name in lists else ""
    assert budgets.totals()[name] <= limit, f"{name}: {places}; target {target}"


@pytest.mark.parametrize("room", LIMITS["rooms"])
def test_rooms(room):
    counted = budgets.rooms()[room]
    tokens, density = LIMITS["rooms"][room]
    assert counted.tokens <= tokens
    assert counted.density <= density


@pytest.mark.parametrize("number", LIMITS["notebooks"])
def test_notebooks(number):
    *limits, target = LIMITS["notebooks"][number]
    counted = dict(zip(budgets.KINDS, budgets.of_notebook(number), strict=True))
    excess = {kind for kind, limit in zip(counted, limits, strict=True) if counted[kind] > limit}
    assert not excess, f"{counted}; limits {limits}, target of all {target}"


def test_everything_has_a_limit():
    assert set(LIMITS["totals"]) == set(budgets.totals())
    assert set(LIMITS["rooms"]) == set(budgets.rooms())
    assert set(LIMITS["notebooks"]) == {number for number, _, _ in budgets.code_cells()}


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        (PROGRAM, Count(tokens=12, lines=2, comments=1)),
        # The string is a token, and so is each of the program in it; a table in a string is no program.
        (f"x = {PROGRAM!r}", Count(tokens=15, lines=1, comments=0)),
        (f"x = {'a, b' + chr(10) + '1, 2'!r}", Count(tokens=3, lines=1, comments=0)),
        ("if [ -d lib ]; then\n  # a comment\n  echo 'two words'\nfi", Count(11, 3, 1)),
    ],
)
def test_tokens_are_the_same_on_every_python(text, counted):
    assert count(text) == counted


def test_statements_and_displays():
    longest = f"x = [{'1, ' * 28}]"
    longer = f"{longest} + 1"
    assert long_statements(longest) == []
    assert long_statements(f"y = 1\n{longer}") == [2]
    assert long_statements(longer.replace("x", "RATES")) == []
    assert starred_displays(STARRED) == [3, 4, 5, 6]
