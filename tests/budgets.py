"""How much there is to read, in tokens, and how much there may be.

Limits only go down: `python tests/budgets.py` lowers those of budgets.yaml to what there is now.
"""

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

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
    paths = [
        path for top in ("lib", "notebooks", "tests") for path in (REPOSITORY / top).rglob("*.*")
    ]
    programs = [path for path in paths if path.suffix in (".py", ".sh", ".js")]
    return {
        path.relative_to(REPOSITORY): count(path.read_text(encoding="utf-8")) for path in programs
    }


def below(folder: str) -> Count:
    """All programs in a folder and below it."""
    return total([counted for path, counted in files().items() if path.is_relative_to(folder)])


def room_of(path: Path) -> str:
    """lib/cs336_systems/attention/tiles.py -> lib/cs336_systems/attention; tests have one level less."""
    depth = 2 if path.parts[0] == "tests" else 3
    return "/".join(path.parent.parts[:depth])


def rooms() -> dict[str, Count]:
    """Every room by what lies in it, and not in a room below it."""
    names = sorted({room_of(path) for path in files()})
    return {
        name: total([counted for path, counted in files().items() if room_of(path) == name])
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


def kind(cell: dict, source: str) -> str:
    """Of a code cell: parameters, imports and checkers are shown even where they are folded."""
    tags = set(cell["metadata"].get("tags", []))
    is_shown = "hide-input" not in tags or tags & {"parameters", "checker"}
    if is_shown or source.lstrip().startswith(("import ", "from ")):
        return "shown"
    return "answers" if calls(source) else "plumbing"


@cache
def code_cells() -> list[tuple[str, str, Count]]:
    """Of every code cell the number of its notebook, its kind, and what is in it."""
    return [
        (number, kind(cell, source), count(source))
        for number, cell, source in cells()
        if cell["cell_type"] == "code"
    ]


def of_kind(name: str, number: str = "") -> Count:
    """Code of a kind, in all notebooks or in one."""
    return total([cell for of, each, cell in code_cells() if each == name and number in (of, "")])


def words() -> int:
    """What a page says: its text and what its answers say, which stands in their outputs.

    What it says in short is its headline, counted there.
    """
    texts = [
        source
        for _, cell, source in cells()
        if cell["cell_type"] == "markdown" and "in-short" not in cell["metadata"].get("tags", [])
    ]
    for _, cell, source in cells():
        if cell["cell_type"] == "code" and calls(source):
            shown = [
                "".join(output.get("data", {}).get("text/markdown", []))
                for output in cell["outputs"]
            ]
            texts.extend(re.sub(r"<[^>]+>", " ", text) for text in shown)
    return sum(len(text.split()) for text in texts)


def places(find: Callable[[str], list[int]]) -> list[str]:
    """ "tests/tokens.py:12" of everything that `find` finds in Python files."""
    paths = [path for path in files() if path.suffix == ".py"]
    texts = {path: (REPOSITORY / path).read_text(encoding="utf-8") for path in paths}
    return [f"{path}:{line}" for path, text in texts.items() for line in find(text)]


def densest(is_kernel: bool) -> float:
    """Tokens a code line of the densest file: of Gluon kernels, or of the others."""
    return max(
        counted.density
        for path, counted in files().items()
        if path.name.startswith("hopper_") == is_kernel
    )


@cache
def totals() -> dict[str, float]:
    """By the names that the limits have."""
    solutions = below("tests/solutions").tokens
    code = [cell for _, _, cell in code_cells()]
    answers = [calls(source).count("answer") for _, _, source in cells()]
    counted: dict[str, float] = {
        "library": below("lib").tokens,
        "tests": below("tests").tokens - solutions,
        "tests/solutions": solutions,
    }
    counted |= {
        "notebooks": total(code).tokens + below("notebooks").tokens,
        "notebooks: folded plumbing": of_kind("plumbing").tokens,
        "notebooks: words": words(),
        "notebooks: answers": sum(answers),
        "notebooks: cells of more than 220 tokens": sum(cell.tokens > 220 for cell in code),
    }
    counted |= {
        "notebooks: density of shown code": of_kind("shown").density,
        "density of the densest file": densest(is_kernel=False),
        "density of the densest Gluon kernel": densest(is_kernel=True),
        "long statements": len(places(long_statements)),
        "starred displays": len(places(starred_displays)),
    }
    counted |= {f"density of {package}": below(package).density for package in PACKAGES}
    for room in COMMENTED:
        of_room = below(f"lib/cs336_systems/{room}")
        counted[f"code lines a comment in {room}"] = of_room.lines / max(of_room.comments, 1)
    return counted


def of_notebook(number: str) -> list[int]:
    """Tokens by kind."""
    return [of_kind(name, number).tokens for name in KINDS]


def counted() -> dict[str, dict]:
    """What there is, as the limits have it."""
    of_room = {name: [room.tokens, rounded_up(room.density)] for name, room in rooms().items()}
    return {
        "totals": {name: [rounded_up(number)] for name, number in totals().items()},
        "rooms": of_room,
        "notebooks": {number: of_notebook(number) for number, _, _ in code_cells()},
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
