"""What may share a line and what may be divided by what: rows that differ only where the plot says so."""

from collections.abc import Iterable

import pandas as pd

from cs336_systems.measure.schema import COLUMNS, KEYS
from cs336_systems.report.labels import UNITS

# Columns that name one thing in several ways: whoever compares one of them does not hold the others fixed.
_SYNONYMS = (
    {"where", "machine", "gpu", "source"},
    {"model", "model_size", "edition", "d_model", "num_heads"},
    {"wrapper", "implementation"},
)


def require_columns(frame: pd.DataFrame, *columns: str | None) -> None:
    """Raises ValueError naming the columns that are asked for and not there."""
    missing = [column for column in columns if column is not None and column not in frame.columns]
    if missing:
        raise ValueError(
            f"the rows have no column {', '.join(missing)}; they have: {', '.join(frame.columns)}"
        )


def check_drawable(frame: pd.DataFrame, x: str, y: str, hue: str | None, facet: str | None) -> None:
    """Make sure that each row of a plot has a place of its own.

    Raises:
        ValueError: a column is missing or has gaps, or two rows belong in one place; the message names which.
    """
    require_columns(frame, x, y, hue, facet)
    for column in filter(None, (x, hue, facet)):
        if empty := int(frame[column].isna().sum()):
            raise ValueError(f"{empty} of {len(frame)} rows have no {column}; fill it in, or leave them out")
    require_one_row_each(frame, x, hue, facet)


def key_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that say what was measured and where, as opposed to what came out."""
    return [column for column in frame.columns if _is_key(frame[column], column)]


def _is_key(cells: pd.Series, column: str) -> bool:
    if column in COLUMNS:
        return column in KEYS or column in ("machine", "gpu")
    computed = cells.dtype.kind == "f" or column.rpartition("_")[2] in UNITS
    return not computed and column != "statistic" and not column.endswith("_status")


def require_one_row_each(frame: pd.DataFrame, *by: str | None) -> None:
    """Raises ValueError when two rows would be drawn in one place, naming what tells them apart."""
    by = tuple(dict.fromkeys(column for column in (*by, "where") if column in frame.columns))
    for key, group in frame.groupby(list(by), dropna=False, sort=False) if by else [((), frame)]:
        if len(group) > 1:
            place = ", ".join(f"{column}={value}" for column, value in zip(by, key, strict=True))
            varying = varying_values(group, key_columns(group))
            why = f"they differ in {varying}; keep one, or spread them over hue or facet"
            why = why if varying else "they are duplicates; keep one of them"
            raise ValueError(f"{len(group)} rows share {place or 'every key'}: {why}")


def varying_values(group: pd.DataFrame, columns: Iterable[str]) -> str:
    """Those of the columns that have several values, with the first of these: "batch_size (8, 4)"."""
    values = {column: group[column].unique() for column in columns}
    return "; ".join(f"{c} ({', '.join(map(str, v[:4]))})" for c, v in values.items() if len(v) > 1)


def compared(
    frame: pd.DataFrame, hue: str, baseline: object, y: str, place: tuple[str, ...] = ()
) -> pd.DataFrame:
    """Put each row beside the baseline's row that is equal to it in every key but `hue`.

    Args:
        frame: rows with the columns `hue` and `y`.
        baseline: the value of `hue` to compare with.
        place: columns a reader sees (x, facet); a row whose place the baseline was never measured at is a gap
            in the plot and is left out, any other row without an equal partner is refused.

    Returns:
        The rows that are not the baseline's, with `baseline` (its y), `baseline_status` and `ratio`: how many
        times better than the baseline: baseline / y where less is better (time, memory), else y / baseline.

    Raises:
        ValueError: the baseline has no row, or two rows differ in something besides `hue`.
    """
    require_columns(frame, hue, y, *place)
    same = next((names for names in _SYNONYMS if hue in names), {hue})
    keys = [column for column in key_columns(frame) if column not in same]
    is_baseline = frame[hue] == baseline
    base, others = frame[is_baseline], frame[~is_baseline]
    if base.empty:
        there = ", ".join(map(str, frame[hue].unique()))
        raise ValueError(f"no row has {hue}={baseline}; there are: {there}")
    require_one_row_each(base, *keys)
    columns = {y: "baseline", "status": "baseline_status"}
    partner = base[[*keys, *(c for c in columns if c in base)]].rename(columns=columns)
    if keys:
        joined = others.merge(partner, on=keys, how="left", indicator="_partner")
        for _, row in joined[joined["_partner"] == "left_only"].iterrows():
            _refuse_near_miss(row, base, keys, hue, [c for c in (*place, "where") if c in keys])
        joined = joined[joined["_partner"] == "both"].drop(columns="_partner")
    else:
        joined = others.merge(partner, how="cross")
    higher_is_better = y.endswith(("_gbps", "_tflops", "_per_s"))
    ratio = joined[y] / joined["baseline"] if higher_is_better else joined["baseline"] / joined[y]
    return joined.assign(ratio=ratio).reset_index(drop=True)


def _refuse_near_miss(row: pd.Series, base: pd.DataFrame, keys: list[str], hue: str, seen: list[str]) -> None:
    """A row without a partner where the reader sees one, and so expects a ratio."""
    near = base[_equal(base[seen], row[seen]).all(axis=1)]
    if near.empty:
        return
    equal = _equal(near[keys], row[keys]).any()
    told = [
        f"{c} ({row[c]} against {', '.join(map(str, near[c].unique()[:4]))})" for c in keys if not equal[c]
    ]
    raise ValueError(
        f"{hue}={row[hue]} cannot be compared with {hue}={near[hue].iloc[0]}: rows must be equal in"
        f" everything else, but they differ in {'; '.join(told) or 'a combination of ' + ', '.join(keys)}"
    )


def _equal(frame: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    """Cell by cell; two empty cells are equal."""
    return (frame == row) | (frame.isna() & row.isna())
