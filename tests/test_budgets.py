"""How many lines each room may have: all of them, docstrings and comments included. Limits only go down."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# room: (limit, target); a room is a folder with all below it. Targets are of whole packages.
BUDGETS: dict[str, tuple[int, int | None]] = {}


def lines_of(room: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (REPOSITORY / room).rglob("*.py"))


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_its_budget(room):
    limit, target = BUDGETS[room]
    lines = lines_of(room)
    assert lines <= limit, f"{room} has {lines:,} lines; its budget is {limit:,}: delete, or simplify"
    assert target is None or target <= limit, f"{room} has reached its target {target:,}: set it lower"
