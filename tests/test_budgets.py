"""How many lines a room may have: all of them, docstrings and comments included. Limits only go down."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# A folder with all below it: what it may have now, and, of whole packages, what it is to come down to.
BUDGETS: dict[str, tuple[int, int | None]] = {
    "lib/cs336_systems": (11_339, 10_000),
    "lib/cs336_systems/accounting": (1_148, 1_150),
    "lib/cs336_systems/attention": (3_299, 3_300),
    "lib/cs336_systems/checks": (1_824, 1_550),
    "lib/cs336_systems/kernels": (808, 650),
    "lib/cs336_systems/parallel": (2_884, 2_150),
    "lib/cs336_systems/training": (699, 700),
    "lib/labbook": (5_000, 5_000),
    "lib/labbook/book": (1_020, 850),
    "lib/labbook/memory": (394, 400),
    "lib/labbook/profiles": (630, 550),
    "notebooks": (250, None),
    "tests": (11_262, 9_500),
}


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_its_budget(room):
    files = (REPOSITORY / room).rglob("*.py")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    limit, target = BUDGETS[room]
    assert lines <= limit, (
        f"{room} has {lines:,} lines, its budget is {limit:,}, its target {target}"
    )


def test_rooms_are_all_budgeted():
    rooms = {
        str(path.parent.relative_to(REPOSITORY)) for path in REPOSITORY.glob("lib/*/*/__init__.py")
    }
    assert rooms <= set(BUDGETS)
