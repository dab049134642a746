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


LISTS = {"long statements": long_statements, "starred displays": starred_displays}


@pytest.fixture(scope="module")
def counted():
    return budgets.counted()


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, names in LIMITS.items() for name in names]
)
def test_there_is_no_more_than_its_limit(counted, part, name):
    now = counted[part][name]
    places = budgets.places(LISTS[name]) if name in LISTS else ""
    limits = LIMITS[part][name]
    assert budgets.lowered(now, limits) == now, f"limits and target: {limits} {places}"


@pytest.mark.parametrize("part", LIMITS)
def test_everything_has_a_limit(counted, part):
    assert LIMITS[part].keys() == counted[part].keys()


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
