"""Answers: sentences with figures taken from rows, shown only when every claim they make holds.

And the library's own code, shown as Markdown.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import numpy as np
import pandas as pd
from IPython import display

from labbook.compare import varying_values
from labbook.labels import significant


@dataclass(frozen=True)
class Claim:
    """Something an answer says, and whether it holds; figures included, so that its failure explains itself.

    Raises TypeError: `holds` is not a single truth value.
    """

    description: str
    holds: bool | np.bool_

    def __post_init__(self):
        if not isinstance(self.holds, bool | np.bool_):
            raise TypeError(
                f"{self.description!r} is {type(self.holds).__name__}, not a truth value; use .all() or "
                ".any() on several"
            )


claim = Claim  # as an answer makes it


def answer(deliverable: str, text: str, *claims: Claim) -> None:
    """Show the answer to one deliverable: **(b)**, the text, and, folded, what was checked.

    Raises AssertionError: a claim does not hold; the message names each that does not. Nothing is shown.
    """
    _require(claims, f"answer ({deliverable})")
    show_markdown(f"**({deliverable})** {text}{_folded(claims)}")


def solution(exercise: int, text: str, *claims: Claim) -> None:
    """Show, folded, the answer to an exercise. Raises as `answer`."""
    _require(claims, f"exercise {exercise}")
    show_markdown(
        f"<details><summary>Answer to exercise {exercise}</summary>\n\n"
        f"{text}{_folded(claims)}\n\n</details>"
    )


def _require(claims, what):
    broken = [claim.description for claim in claims if not claim.holds]
    if broken:
        raise AssertionError(f"{what} does not hold: {'; '.join(broken)}")


def _folded(claims):
    if not claims:
        return ""
    lines = "\n".join(f"<li>✓ {escape(claim.description)}</li>" for claim in claims)
    summary = f"<summary>{plural(len(claims), 'claim')} checked</summary>"
    return f"\n\n<details>{summary}\n<ul>\n{lines}\n</ul>\n</details>"


def show_source(*objects: Callable | type) -> None:
    """Show the lines that run, of functions or classes, without docstrings: the notebook explains."""
    code = "\n\n".join(without_docstrings(inspect.getsource(item)) for item in objects)
    show_markdown(f"```python\n{code}\n```")


def show_markdown(text: str) -> None:
    display.display(display.Markdown(text))


def without_docstrings(source: str) -> str:
    """Python source with the docstrings of its functions and classes taken out, comments and layout kept."""
    source = textwrap.dedent(source)
    lines = dict(enumerate(source.splitlines(), start=1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for number in range(docstring.lineno, docstring.end_lineno + 1):
                del lines[number]
    return "\n".join(lines.values()).rstrip()


def one(frame: pd.DataFrame, **key: object) -> pd.Series:
    """The single row with this key; write `pass_` for the column `pass`.

    Raises LookupError: no row or several rows have it; the message counts them and says in what they differ.
    """
    rows = frame
    for keyword, value in key.items():
        name = keyword.rstrip("_")
        rows = rows[rows[name].isna() if value is None else rows[name] == value]
    if len(rows) == 1:
        return rows.iloc[0]
    raise LookupError(
        f"{len(rows)} rows of {len(frame)} have {key}, not one; "
        f"they differ in {varying_values(rows, rows.columns) or 'nothing'}"
    )


def ms(milliseconds: float, like: float | None = None) -> str:
    """A time with three significant digits: 63.5 µs, 9.53 ms, 12.3 s. In the unit that `like` would have."""
    size = abs(milliseconds if like is None else like)
    if size < 0.1:
        return f"{significant(milliseconds * 1e3)} µs"
    if size < 1e4:
        return f"{significant(milliseconds)} ms"
    return f"{significant(milliseconds / 1e3)} s"


def gib(mib: float, like: float | None = None) -> str:
    """Memory, given in MiB as rows have it: 68.9 MiB, 16.1 GiB. In the unit that `like` would have."""
    if abs(mib if like is None else like) < 1024:
        return f"{significant(mib)} MiB"
    return f"{significant(mib / 1024)} GiB"


def ratio_text(ratio: float) -> str:
    """2.345 -> "2.35×"."""
    return f"{significant(ratio)}×"


def percent(share: float) -> str:
    """0.1234 -> "12.3%"."""
    return f"{significant(share * 100)}%"


def guessed(guess: object, text: Callable = str) -> str:
    """ " (you guessed 4 ms)", where the reader guessed something."""
    return "" if guess is None else f" (you guessed {text(guess)})"


def plural(count: int, noun: str) -> str:
    """1 -> "1 step", 5 -> "5 steps"."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def between(values, unit=ms) -> str:
    """The range of some numbers in one unit: "9.53 ms to 81.2 ms", or one where they round to the same."""
    most = max(values)
    # These two choose a unit by the size, µs or s, MiB or GiB: both numbers get that of the larger.
    low = unit(min(values), like=most) if unit in (ms, gib) else unit(min(values))
    high = unit(most)
    return high if low == high else f"{low} to {high}"
