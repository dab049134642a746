"""How much there is to read, in tokens, and how much there may be.

Limits only go down: `python tests/budgets.py` lowers those of budgets.yaml to what there is now.
"""

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from tokens import Count, count, long_statements, starred_displays, total

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("lib/cs336_systems", "lib/labbook", "tests")
COMMENTED = ("attention", "kernels", "parallel", "training")
KINDS = ("shown", "answers", "plumbing")
LIMITS = Path(__file__).with_suffix(".yaml")


@cache
def limits() -> dict[str, dict]:
    """What there may be: totals, rooms and notebooks; the last number of a list is what it comes down to."""
    return yaml.safe_load(LIMITS.read_text(encoding="utf-8"))


@cache
def files() -> dict[Path, Count]:
    """Every program, its path from the top of the repository."""
    counts = {}
    for top in ("lib", "notebooks", "tests"):
        for path in (REPOSITORY / top).rglob("*.*"):
            if path.suffix in (".py", ".sh", ".js"):
                counts[path.relative_to(REPOSITORY)] = count(path.read_text(encoding="utf-8"))
    return counts


def below(folder: str) -> Count:
    """All programs in a folder and below it."""
    return total([of_file for path, of_file in files().items() if path.is_relative_to(folder)])


def room_of(path: Path) -> str:
    """lib/cs336_systems/attention/tiles.py -> lib/cs336_systems/attention; tests have one level less."""
    depth = 2 if path.parts[0] == "tests" else 3
    return "/".join(path.parent.parts[:depth])


def rooms() -> dict[str, Count]:
    """Every room by what lies in it, and not in a room below it."""
    names = sorted({room_of(path) for path in files()})
    return {
        name: total([of_file for path, of_file in files().items() if room_of(path) == name])
        for name in names
    }


@cache
def cells() -> list[tuple[str, dict, str]]:
    """Number of the notebook, cell, source."""
    notebooks = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
    return [
        (path.name[:2], cell, "".join(cell["source"]))
        for path in notebooks
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]


def calls(source: str) -> list[str]:
    """Calls of `answer` and of `solution`, which shows an exercise's."""
    return re.findall(r"^\s*(answer|solution)\(", source, re.MULTILINE)


def _tags(cell):
    return cell["metadata"].get("tags", [])


def kind(cell: dict, source: str) -> str:
    """Of a code cell: parameters, imports and checkers are shown even where they are folded."""
    is_shown = "hide-input" not in _tags(cell) or {"parameters", "checker"} & set(_tags(cell))
    if is_shown or source.lstrip().startswith(("import ", "from ")):
        return "shown"
    return "answers" if calls(source) else "plumbing"


class CodeCell(NamedTuple):
    """A code cell: the number of its notebook, one of KINDS, and what is in it."""

    notebook: str
    kind: str
    count: Count


@cache
def code_cells() -> list[CodeCell]:
    """Of all notebooks."""
    return [
        CodeCell(number, kind(cell, source), count(source))
        for number, cell, source in cells()
        if cell["cell_type"] == "code"
    ]


def of_kind(name: str, among: list[CodeCell]) -> Count:
    """The code of one of KINDS among some cells."""
    return total([cell.count for cell in among if cell.kind == name])


def words() -> int:
    """What pages say."""
    texts = [text for _, cell, source in cells() for text in texts_of(cell, source)]
    return sum(len(text.split()) for text in texts)


def texts_of(cell: dict, source: str) -> list[str]:
    """What a cell says: its text, or what its answers say, which stands in its outputs.

    What a page says in short is its headline, counted there.
    """
    if cell["cell_type"] == "markdown":
        return [] if "in-short" in _tags(cell) else [source]
    if not calls(source):
        return []
    shown = [output.get("data", {}).get("text/markdown", []) for output in cell["outputs"]]
    return [re.sub(r"<[^>]+>", " ", "".join(lines)) for lines in shown]


def places(find: Callable[[str], list[int]]) -> list[str]:
    """ "tests/tokens.py:12" of everything that `find` finds in Python files."""
    paths = [path for path in files() if path.suffix == ".py"]
    texts = {path: (REPOSITORY / path).read_text(encoding="utf-8") for path in paths}
    return [f"{path}:{line}" for path, text in texts.items() for line in find(text)]


def densest(is_kernel: bool) -> float:
    """Tokens a code line of the densest file: of Gluon kernels, or of the others."""
    return max(
        of_file.density
        for path, of_file in files().items()
        if path.name.startswith("hopper_") == is_kernel
    )


def totals() -> dict[str, float]:
    """By the names that the limits have."""
    return _of_programs() | _of_notebooks() | _densities()


def _of_programs():
    """How much library there is and how many tests, and what no style allows in them."""
    solutions = below("tests/solutions").tokens
    return {
        "library": below("lib").tokens,
        "tests": below("tests").tokens - solutions,
        "tests/solutions": solutions,
        "long statements": len(places(long_statements)),
        "starred displays": len(places(starred_displays)),
    }


def _of_notebooks():
    """How much code there is in notebooks, and how much text."""
    code = [cell.count for cell in code_cells()]
    tokens = total(code).tokens + below("notebooks").tokens
    answers = [calls(source).count("answer") for _, _, source in cells()]
    return {
        "notebooks": tokens,
        "notebooks: folded plumbing": of_kind("plumbing", code_cells()).tokens,
        "notebooks: words": words(),
        "notebooks: answers": sum(answers),
        "notebooks: cells of more than 220 tokens": sum(cell.tokens > 220 for cell in code),
    }


def _densities():
    """Tokens a code line, and code lines a comment."""
    ratios = {
        "notebooks: density of shown code": of_kind("shown", code_cells()).density,
        "density of the densest file": densest(is_kernel=False),
        "density of the densest Gluon kernel": densest(is_kernel=True),
    }
    for package in PACKAGES:
        ratios[f"density of {package}"] = below(package).density
    for room in COMMENTED:
        of_room = below(f"lib/cs336_systems/{room}")
        ratios[f"code lines a comment in {room}"] = of_room.lines / max(of_room.comments, 1)
    return ratios


def _of_notebook(number):
    """Tokens by kind."""
    of_page = [cell for cell in code_cells() if cell.notebook == number]
    return [of_kind(name, of_page).tokens for name in KINDS]


def counted() -> dict[str, dict]:
    """What there is, as the limits have it."""
    of_rooms = {name: [room.tokens, rounded_up(room.density)] for name, room in rooms().items()}
    return {
        "totals": {name: [rounded_up(number)] for name, number in totals().items()},
        "rooms": of_rooms,
        "notebooks": {cell.notebook: _of_notebook(cell.notebook) for cell in code_cells()},
    }


def lowered(before: list, now: list) -> list:
    """Limits as low as what there is, none higher than before; a target follows them."""
    pairs = zip(before, now, strict=False)
    return list(map(min, pairs)) + before[len(now) :]


def rounded_up(number: float) -> float:
    """Whole numbers as they are, of a density one digit."""
    return number if isinstance(number, int) else math.ceil(10 * number) / 10


if __name__ == "__main__":
    comment = "".join(line for line in LIMITS.open(encoding="utf-8") if line.startswith("#"))
    now = counted()
    lower = {
        part: {name: lowered(before, now[part][name]) for name, before in of_part.items()}
        for part, of_part in limits().items()
    }
    text = yaml.safe_dump(lower, sort_keys=False, default_flow_style=None, width=100)
    LIMITS.write_text(comment + text, encoding="utf-8")
