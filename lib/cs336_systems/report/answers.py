"""Answers: sentences with figures taken from rows, shown only when every claim they make holds."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from cs336_systems.report.frames import plain, require_columns
from cs336_systems.report.words import significant


@dataclass(frozen=True)
class Claim:
    """Something an answer says, with the figures in its description, and whether it holds."""

    description: str
    holds: bool


def claim(description: str, holds: bool) -> Claim:
    """Name a claim, figures included, so that its failure explains itself.

    Raises:
        TypeError: `holds` is not a single truth value.
    """
    return Claim(description, _truth(holds, f"the claim {description!r}"))


def answer(deliverable: str, text: str, *claims: bool | Claim) -> None:
    """Show the answer to one deliverable as Markdown: **(b)** and the text.

    Raises:
        AssertionError: a claim does not hold; the message names each that does not. Nothing is shown.
        TypeError: a claim is neither a truth value nor made by `claim`.
    """
    from IPython.display import Markdown, display

    named = [
        one if isinstance(one, Claim) else claim(f"claim {number} of: {text}", one)
        for number, one in enumerate(claims, start=1)
    ]
    broken = [one.description for one in named if not one.holds]
    if broken:
        raise AssertionError(f"answer ({deliverable}) does not hold: " + "; ".join(broken))
    display(Markdown(f"**({deliverable})** {text}"))


def pending(deliverable: str, missing: str) -> None:
    """Stand in for an answer whose rows are not measured yet: `missing` says which."""
    answer(deliverable, f"*No answer yet: {missing}.*")


def one(frame: pd.DataFrame, **key: object) -> pd.Series:
    """The single row with this key; write `pass_` for the column `pass`.

    Raises:
        LookupError: no row or several rows have it; the message counts them and names near misses.
        ValueError: the rows have no such column.
    """
    key = {name.rstrip("_"): value for name, value in key.items()}
    require_columns(frame, *key)
    frame = plain(frame)
    agrees = {
        name: frame[name].isna() if value is None else frame[name] == value for name, value in key.items()
    }
    found = frame[np.logical_and.reduce(list(agrees.values()))] if key else frame
    if len(found) == 1:
        return found.iloc[0]
    asked = ", ".join(f"{name}={value!r}" for name, value in key.items())
    if len(found):
        varying = [name for name in found.columns if found[name].nunique(dropna=False) > 1]
        raise LookupError(
            f"{len(found)} rows have {asked}, one is wanted; they differ in {', '.join(varying)}"
        )
    raise LookupError(f"no row of {len(frame)} has {asked}{_near_misses(frame, agrees)}")


def _near_misses(frame: pd.DataFrame, agrees: dict[str, pd.Series]) -> str:
    """What one key would have to be for some row to agree in all the others."""
    hints = []
    for name in agrees:
        others = [mask for other, mask in agrees.items() if other != name]
        near = frame[np.logical_and.reduce(others)] if others else frame
        if len(near):
            hints.append(f"{name} is {', '.join(map(str, near[name].unique()[:6]))}")
    return f"; there are rows where only {', or only '.join(hints)}" if hints else ""


def ms(milliseconds: float) -> str:
    """A time with three significant digits: 63.5 µs, 9.53 ms, 12.3 s."""
    if abs(milliseconds) < 0.1:
        return f"{significant(milliseconds * 1e3)} µs"
    return (
        f"{significant(milliseconds)} ms"
        if abs(milliseconds) < 1e4
        else f"{significant(milliseconds / 1e3)} s"
    )


def gib(mib: float) -> str:
    """Memory, given in MiB as rows have it: 68.9 MiB, 16.1 GiB."""
    return f"{significant(mib)} MiB" if abs(mib) < 1024 else f"{significant(mib / 1024)} GiB"


def ratio_text(ratio: float) -> str:
    """2.345 -> "2.35×"."""
    return f"{significant(ratio)}×"


def percent(share: float) -> str:
    """0.1234 -> "12.3%"."""
    return f"{significant(share * 100)}%"


def plural(count: int, noun: str, plural_noun: str | None = None) -> str:
    """1 -> "1 step", 5 -> "5 steps"."""
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"


def between(values, unit=ms) -> str:
    """The range of some numbers: "9.53 ms to 81.2 ms", or one text when they round to the same.

    Both ends of a range of times have one unit where that reads well: "98.3 µs to 103 µs".
    """
    low, high = unit(min(values)), unit(max(values))
    if unit is ms and low.endswith("µs") and 0.1 <= max(values) < 1:
        high = f"{significant(max(values) * 1e3)} µs"
    return low if low == high else f"{low} to {high}"


def _truth(value: object, what: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{what} is {type(value).__name__}, not a truth value; use .all() or .any() on several")
