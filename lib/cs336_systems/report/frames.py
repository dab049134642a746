"""What may share a line and what may be divided by what: rows that differ only where the plot says so."""

import numpy as np
import pandas as pd

from cs336_systems.measure.schema import COLUMNS
from cs336_systems.report.words import UNITS

# Columns that name one thing in several ways: whoever compares one of them does not hold the others fixed.
_SYNONYMS = (
    {"where", "machine", "gpu", "source"},
    {"model", "model_size", "edition", "d_model", "num_heads"},
)


def require_columns(frame: pd.DataFrame, *columns: str | None) -> None:
    """Raises ValueError naming the columns that are asked for and not there."""
    missing = [column for column in columns if column is not None and column not in frame.columns]
    if missing:
        raise ValueError(
            f"the rows have no column {', '.join(missing)}; they have: {', '.join(frame.columns)}"
        )


def drawable(frame: pd.DataFrame, x: str, y: str, hue: str | None, facet: str | None) -> pd.DataFrame:
    """The rows of a plot, once it is sure that each has a place of its own.

    Raises:
        ValueError: a column is missing or has gaps, or two rows belong in one place; the message names which.
    """
    require_columns(frame, x, y, hue, facet)
    frame = plain(frame)
    for column in filter(None, (x, hue, facet)):
        if empty := int(frame[column].isna().sum()):
            raise ValueError(f"{empty} of {len(frame)} rows have no {column}; fill it in, or leave them out")
    require_one_row_each(frame, x, hue, facet)
    return frame


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with numpy's numbers: whole numbers with gaps become float, gaps NaN."""
    return frame.apply(_plain_column) if len(frame) else frame


def _plain_column(column: pd.Series) -> pd.Series:
    column = column.infer_objects()
    if pd.api.types.is_bool_dtype(column.dtype) and column.isna().any():
        return column.astype(object).where(column.notna(), np.nan)
    if pd.api.types.is_extension_array_dtype(column.dtype) and column.dtype.kind in "iufb":
        return column.astype("float64" if column.isna().any() else column.dtype.numpy_dtype)
    return column


def key_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that say what was measured and where, as opposed to what came out."""
    return [column for column in frame.columns if _is_key(frame[column], column)]


def _is_key(cells: pd.Series, column: str) -> bool:
    if column in COLUMNS:
        return COLUMNS[column].kind == "key" or column in ("machine", "gpu")
    computed = cells.dtype.kind == "f" or column.rpartition("_")[2] in UNITS
    return not computed and column != "statistic" and not column.endswith("_status")


def require_one_row_each(frame: pd.DataFrame, *by: str | None) -> None:
    """Raises ValueError when two rows would be drawn in one place, naming what tells them apart."""
    by = tuple(dict.fromkeys(column for column in (*by, "where") if column in frame.columns))
    for key, group in frame.groupby(list(by), dropna=False, sort=False) if by else [((), frame)]:
        if len(group) > 1:
            place = ", ".join(f"{column}={value}" for column, value in zip(by, key, strict=True))
            raise ValueError(f"{len(group)} rows share {place or 'every key'}: {_differences(group, by)}")


def _differences(group: pd.DataFrame, by: tuple[str, ...]) -> str:
    varying = [column for column in key_columns(group) if group[column].nunique(dropna=False) > 1]
    if not varying:
        return "they are duplicates; keep one of them"
    return f"they differ in {_values(group, varying)}; keep one, or spread them over hue or facet"


def _values(group: pd.DataFrame, columns: list[str]) -> str:
    return "; ".join(f"{column} ({', '.join(map(str, group[column].unique()[:4]))})" for column in columns)


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
    frame = plain(frame)
    group = next((names for names in _SYNONYMS if hue in names), {hue})
    keys = [column for column in key_columns(frame) if column not in group]
    is_baseline = frame[hue] == baseline
    if not is_baseline.any():
        raise ValueError(
            f"no row has {hue}={baseline}; there are: {', '.join(map(str, frame[hue].unique()))}"
        )
    base, others = frame[is_baseline], frame[~is_baseline]
    require_one_row_each(base, *keys)
    columns = {y: "baseline", "status": "baseline_status"}
    partner = base[[*keys, *(c for c in columns if c in base)]].rename(columns=columns)
    joined = (
        others.merge(partner, on=keys, how="left", indicator=True)
        if keys
        else others.merge(partner, how="cross")
    )
    if keys:
        alone = joined[joined["_merge"] == "left_only"]
        _refuse_near_misses(alone, base, keys, hue, baseline, place)
        joined = joined[joined["_merge"] == "both"].drop(columns="_merge")
    higher_is_better = y.endswith(("_gbps", "_tflops", "_per_s"))
    ratio = joined[y] / joined["baseline"] if higher_is_better else joined["baseline"] / joined[y]
    return joined.assign(ratio=ratio).reset_index(drop=True)


def _refuse_near_misses(alone, base, keys, hue, baseline, place) -> None:
    for _, row in alone.iterrows():
        here = [column for column in (*place, "where") if column in keys]
        near = base[_equal(base[here], row[here]).all(axis=1)]
        if near.empty:
            continue
        equal = _equal(near[keys], row[keys]).any()
        told = [
            f"{c} ({row[c]} against {', '.join(map(str, near[c].unique()[:4]))})"
            for c in keys
            if not equal[c]
        ]
        raise ValueError(
            f"{hue}={row[hue]} cannot be compared with {hue}={baseline}: rows must be equal in everything"
            f" else, but they differ in {'; '.join(told) or 'a combination of ' + ', '.join(keys)}"
        )


def _equal(frame: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    """Cell by cell; two empty cells are equal."""
    return (frame == row) | (frame.isna() & row.isna())
