"""What may be compared: rows of one place, rows that differ in one thing, rows beside others'."""

from collections.abc import Iterable, Sequence

import pandas as pd

from labbook.labels import UNITS, vocabulary
from labbook.schema import schema


def key_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that say what was measured and where, as opposed to what came out."""
    keys = set(schema().keys)
    values = set(schema().values) | {"status", "reason", "run"}
    columns = []
    for name in frame:
        is_value = name in values or _is_value(frame[name])
        if name in keys or not is_value:
            columns.append(name)
    return columns


def _is_value(column: pd.Series) -> bool:
    """Whether a column that no table has is a result, by its numbers or its name."""
    _, _, end = column.name.rpartition("_")
    return column.dtype.kind == "f" or end == "status" or end in UNITS


def require_one_row_each(frame: pd.DataFrame, *by: str | None) -> None:
    """Raises ValueError when two rows would be drawn in one place, naming what tells them apart."""
    named = filter(None, by)
    columns = list(dict.fromkeys(named))
    for key, group in frame.groupby(columns, dropna=False, sort=False):
        if len(group) == 1:
            continue
        pairs = zip(columns, key, strict=True)
        place = ", ".join(f"{column}={value}" for column, value in pairs)
        varying = varying_values(group, key_columns(group)) or "nothing: they are duplicates"
        raise ValueError(f"{len(group)} rows share {place}; they differ in {varying}")


def varying_values(group: pd.DataFrame, columns: Iterable[str]) -> str:
    """Those of the columns that have several values, with the first of these: "batch_size (8, 4)"."""
    texts = []
    for column in columns:
        values = group[column].unique()
        if len(values) > 1:
            first = ", ".join(map(str, values[:4]))
            texts.append(f"{column} ({first})")
    return "; ".join(texts)


def compared(frame: pd.DataFrame, hue: str, baseline: object, y: str) -> pd.DataFrame:
    """The rows that the baseline has an equal of, in every key but `hue` and its synonyms.

    Returns the rows with `baseline` (its y), `baseline_status` and `ratio`, baseline / y.
    Raises ValueError: there are no such rows; the message names what they differ in.
    """
    same = {hue}
    for synonyms in vocabulary().synonyms:
        if hue in synonyms:
            same |= synonyms
    keys = [column for column in key_columns(frame) if column not in same]
    is_baseline = frame[hue] == baseline
    partners = frame[is_baseline].reindex(columns=keys + [y, "status"])
    partners = partners.rename(columns={y: "baseline", "status": "baseline_status"})
    pairs = frame[~is_baseline].merge(partners, on=keys)
    if pairs.empty and not is_baseline.all():
        message = f"no row can be divided by one of {hue}={baseline}"
        raise ValueError(f"{message}: they differ in {varying_values(frame, keys)}")
    return pairs.assign(ratio=pairs["baseline"] / pairs[y])


def beside_reference(rows: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """This machine's rows, and what the reference took for the same, after the longest of its warm-ups.

    Returns the rows; if any has a partner, with `reference_ms`, its median, and `reference_status`.
    """
    keys = [name for name in _measurement(rows) if name in theirs]
    theirs = longest_warmup(theirs).reindex(columns=keys + ["p50_ms", "status"])
    theirs = theirs.rename(columns={"p50_ms": "reference_ms", "status": "reference_status"})
    both = rows.merge(theirs, on=keys, how="left")
    has_partner = both["reference_status"].notna().any()
    return both if has_partner else rows


def _measurement(rows: pd.DataFrame) -> list[str]:
    """Columns of the rows: those that differ in none of them measured the same."""
    return [name for name in schema().keys if name in rows and name != "warmup_steps"]


def times_in(frame: pd.DataFrame) -> list[str]:
    """The columns of times that rows of `beside_reference` have, for a table."""
    return [name for name in ("p50_ms", "reference_ms") if name in frame]


def longest_warmup(frame: pd.DataFrame) -> pd.DataFrame:
    """Of rows that differ in their warm-up alone the one with the longest: they are one point of a plot."""
    if "warmup_steps" not in frame:
        return frame
    by_warmup = frame.sort_values("warmup_steps", kind="stable")
    return by_warmup.drop_duplicates(_measurement(frame), keep="last").sort_index()


def beside_published(
    theirs: pd.DataFrame, ours: pd.DataFrame, keys: Sequence[str], value: str
) -> pd.DataFrame:
    """What reports and we measured of the same: keys, `theirs`, `ours`, their `ratio`, and a report's `card`.

    Raises ValueError: two of our rows agree in the keys.
    """
    require_one_row_each(ours, *keys)
    keys = list(keys)
    theirs = theirs.rename(columns={value: "theirs", "gpu": "card"})
    ours = ours[keys + [value]].rename(columns={value: "ours"})
    # Of a key one may have whole numbers, the other fractions.
    numbers = dict.fromkeys(ours[keys].select_dtypes("number"), float)
    theirs = theirs.astype(numbers)
    ours = ours.astype(numbers)
    both = theirs.merge(ours, on=keys)
    both = both.dropna(subset=["theirs", "ours"])
    # A gap in a key made floats of its whole numbers.
    both[keys] = both[keys].convert_dtypes()
    both["ratio"] = both["theirs"] / both["ours"]
    columns = keys + ["theirs", "ours", "ratio", "card"]
    return both[columns]
