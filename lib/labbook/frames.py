"""What may share a line and what may be divided by what: rows that differ only where the plot says so."""

from collections.abc import Iterable

import pandas as pd

from labbook.labels import UNITS, vocabulary
from labbook.rows import KEYS, VALUES


def key_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that say what was measured and where, as opposed to what came out."""
    return [column for column in frame.columns if _is_key(frame[column], column)]


def _is_key(cells: pd.Series, column: str) -> bool:
    if column in KEYS or column in ("machine", "gpu"):
        return True
    if column in (*VALUES, "status", "reason", "run"):
        return False
    computed = cells.dtype.kind == "f" or column.rpartition("_")[2] in UNITS
    return not computed and column != "statistic" and not column.endswith("_status")


def require_one_row_each(frame: pd.DataFrame, *by: str | None) -> None:
    """Raises ValueError when two rows would be drawn in one place, naming what tells them apart."""
    by = list(dict.fromkeys([*filter(None, by), *(["where"] if "where" in frame else [])]))
    for key, group in frame.groupby(by, dropna=False, sort=False) if by else [((), frame)]:
        if len(group) > 1:
            place = ", ".join(f"{column}={value}" for column, value in zip(by, key, strict=True))
            varying = varying_values(group, key_columns(group)) or "nothing: they are duplicates"
            raise ValueError(f"{len(group)} rows share {place or 'every key'}; they differ in {varying}")


def varying_values(group: pd.DataFrame, columns: Iterable[str]) -> str:
    """Those of the columns that have several values, with the first of these: "batch_size (8, 4)"."""
    values = {column: group[column].unique() for column in columns}
    return "; ".join(f"{c} ({', '.join(map(str, v[:4]))})" for c, v in values.items() if len(v) > 1)


def compared(frame: pd.DataFrame, hue: str, baseline: object, y: str) -> pd.DataFrame:
    """The rows that the baseline has an equal of, in every key but `hue` and its synonyms.

    Returns:
        The rows with `baseline` (its y), `baseline_status` and `ratio`, baseline / y.

    Raises:
        ValueError: there are no such rows; the message names what they differ in.
    """
    same = next((names for names in vocabulary().synonyms if hue in names), {hue})
    keys = [column for column in key_columns(frame) if column not in same]
    base, others = frame[frame[hue] == baseline], frame[frame[hue] != baseline]
    columns = {y: "baseline", "status": "baseline_status"}
    partner = base[[*keys, *(c for c in columns if c in base)]].rename(columns=columns)
    joined = others.merge(partner, on=keys)
    if joined.empty and len(others):
        varying = varying_values(frame, keys)
        raise ValueError(f"no row can be divided by one of {hue}={baseline}: they differ in {varying}")
    return joined.assign(ratio=joined["baseline"] / joined[y])
