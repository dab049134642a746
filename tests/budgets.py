"""How much there is to read, in tokens, and how much there may be.

Limits only go down: `python tests/budgets.py` prints the tables with what there is now, where that is less.
"""

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokens import Count, count, long_statements, starred_displays, total

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("lib/cs336_systems", "lib/labbook", "tests")
COMMENTED = ("attention", "kernels", "parallel", "training")
KINDS = ("shown", "answers", "plumbing")
# What there may be now, and what it is to come down to.
TOTALS: dict[str, tuple[float, float]] = {
    "library": (142_000, 124_000),
    "tests": (111_100, 98_000),
    "tests/solutions": (25_000, 25_000),
    "notebooks": (163_500, 105_000),
    "notebooks: folded plumbing": (41_000, 12_000),
    "notebooks: words": (75_600, 42_000),
    "notebooks: answers": (202, 110),
    "notebooks: cells of more than 220 tokens": (81, 0),
    "notebooks: density of shown code": (13.6, 10.0),
    "density of the densest file": (18.9, 11.5),
    "density of the densest Gluon kernel": (12.5, 12.5),
    "long statements": (39, 0),
    "starred displays": (288, 0),
    "density of lib/cs336_systems": (10.7, 10.0),
    "density of lib/labbook": (10.7, 10.0),
    "density of tests": (11.3, 10.0),
    "code lines a comment in attention": (43.5, 25),
    "code lines a comment in kernels": (117.4, 25),
    "code lines a comment in parallel": (74.9, 25),
    "code lines a comment in training": (131.1, 25),
}
# Tokens, and tokens a code line.
ROOMS: dict[str, tuple[int, float]] = {
    "lib": (1_300, 9.9),
    "lib/cs336_systems": (4_600, 9.9),
    "lib/cs336_systems/accounting": (7_600, 10.4),
    "lib/cs336_systems/attention": (32_500, 11.7),
    "lib/cs336_systems/checks": (15_900, 9.9),
    "lib/cs336_systems/kernels": (7_100, 12.5),
    "lib/cs336_systems/parallel": (17_000, 9.2),
    "lib/cs336_systems/traffic": (2_800, 9.7),
    "lib/cs336_systems/training": (8_500, 11.4),
    "lib/labbook": (28_300, 10.8),
    "lib/labbook/book": (9_300, 10.0),
    "lib/labbook/memory": (4_300, 11.0),
    "lib/labbook/profiles": (6_600, 9.6),
    "notebooks": (700, 2.7),
    "tests": (12_100, 11.4),
    "tests/accounting": (4_800, 12.0),
    "tests/attention": (15_000, 13.8),
    "tests/checks": (8_800, 10.1),
    "tests/claims": (2_200, 10.2),
    "tests/kernels": (6_400, 13.4),
    "tests/labbook": (41_000, 10.6),
    "tests/parallel": (16_000, 10.8),
    "tests/planted": (1_400, 11.4),
    "tests/traffic": (700, 12.6),
    "tests/training": (7_000, 12.3),
}
# Tokens shown, of answers and solutions, of folded plumbing; and what all of them are to come down to.
NOTEBOOKS: dict[str, tuple[int, int, int, int]] = {
    "00": (100, 0, 0, 70),
    "11": (3_800, 1_400, 1_200, 3_500),
    "12": (1_700, 1_100, 4_200, 4_400),
    "13": (1_400, 500, 200, 1_800),
    "14": (2_800, 1_100, 1_100, 3_000),
    "15": (4_500, 1_500, 1_200, 5_200),
    "16": (3_100, 1_000, 1_700, 3_700),
    "21": (2_800, 900, 600, 2_900),
    "22": (2_000, 1_300, 2_100, 2_900),
    "23": (3_500, 800, 800, 3_000),
    "24": (4_600, 1_000, 2_100, 5_000),
    "25": (5_300, 1_400, 1_600, 5_400),
    "26": (3_900, 1_700, 3_400, 3_300),
    "27": (5_500, 1_200, 4_200, 6_200),
    "31": (1_500, 800, 1_100, 2_500),
    "32": (1_600, 300, 400, 1_900),
    "33": (2_600, 1_300, 300, 2_500),
    "34": (1_800, 800, 300, 1_800),
    "35": (1_600, 600, 300, 2_100),
    "36": (2_700, 1_300, 800, 2_900),
    "37": (1_800, 700, 500, 2_200),
    "38": (1_250, 750, 1_060, 1_700),
    "41": (2_300, 800, 800, 2_700),
    "42": (2_300, 1_800, 2_300, 4_200),
    "43": (2_600, 600, 1_400, 3_700),
    "44": (2_500, 1_100, 1_800, 4_200),
    "51": (3_300, 800, 300, 2_600),
    "52": (2_600, 800, 200, 2_400),
    "53": (1_600, 500, 0, 1_800),
    "54": (1_600, 600, 0, 1_900),
    "55": (4_400, 1_100, 600, 4_100),
    "56": (3_300, 700, 300, 3_100),
    "61": (5_700, 1_900, 4_500, 5_000),
}


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
    """What a page says: its text and what its answers say, which stands in their outputs."""
    texts = [source for _, cell, source in cells() if cell["cell_type"] == "markdown"]
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
    """What TOTALS limits."""
    solutions = below("tests/solutions").tokens
    code = [cell for _, _, cell in code_cells()]
    counted: dict[str, float] = {
        "library": below("lib").tokens,
        "tests": below("tests").tokens - solutions,
        "tests/solutions": solutions,
        "notebooks": total(code).tokens + below("notebooks").tokens,
        "notebooks: folded plumbing": of_kind("plumbing").tokens,
        "notebooks: words": words(),
        "notebooks: answers": sum(calls(source).count("answer") for _, _, source in cells()),
        "notebooks: cells of more than 220 tokens": sum(cell.tokens > 220 for cell in code),
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


def main() -> None:
    """Print the three tables; no limit is higher than before."""
    print("TOTALS: dict[str, tuple[float, float]] = {")
    for name, number in totals().items():
        limit, target = TOTALS.get(name, (math.inf, 0))
        print(f'    "{name}": ({_written(min(limit, number))}, {_written(target)}),')
    print("}\nROOMS: dict[str, tuple[int, float]] = {")
    for room, counted in rooms().items():
        tokens, density = ROOMS.get(room, (math.inf, math.inf))
        density = min(density, counted.density)
        print(f'    "{room}": ({_written(min(tokens, counted.tokens))}, {_written(density)}),')
    print("}\nNOTEBOOKS: dict[str, tuple[int, int, int, int]] = {")
    for number, (*limits, target) in NOTEBOOKS.items():
        lowered = [_written(min(pair)) for pair in zip(limits, of_notebook(number), strict=True)]
        print(f'    "{number}": ({", ".join(lowered)}, {_written(target)}),')
    print("}")


def _written(number: float) -> str:
    """123456 -> 123_456; of a density one digit, rounded up."""
    return f"{number:_}" if number == int(number) else f"{math.ceil(10 * number) / 10:.1f}"


if __name__ == "__main__":
    main()
