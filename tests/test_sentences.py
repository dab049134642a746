"""Words above a plot that a row could prove wrong are computed from rows, not written as they were once."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("[1-9]*.ipynb"))
COULD_BE_FALSE = re.compile(
    r"(?i)\b(no|not|never|none|nothing|nowhere|neither|cannot|only|alone|all|every|always|unless|until"
    r"|best|worst|most|fastest|slowest|largest|smallest|longest|shortest|highest|lowest)\b"
)
# What says how something is drawn, counted or built, and not what was found.
DEFINITIONS = """
all scores counted
with all scores, with the causal half
Where to look in a report
all layers, float32
the kernel that takes longest
every number of the ramp
the reports state none
Saved for backward at most
no tile is read twice
nothing to hide behind
that is not sharded
every further device costs
""".strip().splitlines()


def said(source: str, *kinds: str) -> Iterator[str]:
    """What stands above plots and tables of a cell without being an f-string."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        found = [word.value for word in call.keywords if word.arg in kinds]
        yield from (each.value for each in found if isinstance(each, ast.Constant))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_could_be_false_is_computed(path):
    """In chapter 1 every title, and other words above plots and tables; of other chapters titles alone."""
    first = path.stem.startswith("1")
    kinds = ("title", "subtitle", "caption")[: 3 if first else 1]
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    texts = [
        text for cell in cells for text in said(cell.source, *kinds) if COULD_BE_FALSE.search(text)
    ]
    texts += [text for cell in cells for text in said(cell.source, "title") if first]
    assert [text for text in texts if not any(each in text for each in DEFINITIONS)] == []


def test_a_written_finding_is_seen_and_a_computed_one_is_not():
    assert [*said('bars(x, title="Never slower")', "title")] == ["Never slower"]
    assert [*said('bars(x, title=f"{n} of {m} are slower")', "title")] == []
