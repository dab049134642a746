"""What may be compared: rows of one place, rows that differ in one thing, rows of several machines."""

from collections.abc import Iterable, Sequence

import pandas as pd

from labbook.labels import UNITS, value_label, vocabulary
from labbook.project import project
from labbook.rows import load_rows, published
from labbook.schema import schema


def key_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that say what was measured and where, as opposed to what came out."""
    keys = set(schema().keys) | {"machine", "gpu"}
    values = set(schema().values) | {"status", "reason", "run"}
    return [
        name for name in frame if name in keys or not (name in values or _is_value(frame[name]))
    ]


def _is_value(column: pd.Series) -> bool:
    """Whether a column that no table has is a result, by its numbers or its name."""
    _, _, end = column.name.rpartition("_")
    return column.dtype.kind == "f" or end == "status" or end in UNITS


def require_one_row_each(frame: pd.DataFrame, *by: str | None) -> None:
    """Raises ValueError when two rows would be drawn in one place, naming what tells them apart."""
    columns = list(dict.fromkeys(filter(None, by)))
    if "where" in frame and "where" not in columns:
        columns.append("where")
    for key, group in frame.groupby(columns, dropna=False, sort=False):
        if len(group) > 1:
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
            texts.append(f"{column} ({', '.join(map(str, values[:4]))})")
    return "; ".join(texts)


def compared(frame: pd.DataFrame, hue: str, baseline: object, y: str) -> pd.DataFrame:
    """The rows that the baseline has an equal of, in every key but `hue` and its synonyms.

    Returns the rows with `baseline` (its y), `baseline_status` and `ratio`, baseline / y.
    Raises ValueError: there are no such rows; the message names what they differ in.
    """
    names = next((names for names in vocabulary().synonyms if hue in names), {hue})
    keys = [column for column in key_columns(frame) if column not in names]
    is_baseline = frame[hue] == baseline
    partners = frame[is_baseline].reindex(columns=keys + [y, "status"])
    partners = partners.rename(columns={y: "baseline", "status": "baseline_status"})
    pairs = frame[~is_baseline].merge(partners, on=keys)
    if pairs.empty and not is_baseline.all():
        varying = varying_values(frame, keys)
        raise ValueError(
            f"no row can be divided by one of {hue}={baseline}: they differ in {varying}"
        )
    return pairs.assign(ratio=pairs["baseline"] / pairs[y])


def side_by_side(
    slug: str, machine: str, reference: str = "", *, table: str, sharing: Sequence[str] = ()
) -> pd.DataFrame:
    """The reference's rows and this machine's, with a column `where` that plots understand.

    machine: slug of this machine; where it is the reference, its rows appear once.
    reference: by default the project's.
    sharing: of the reference only rows that agree in these columns with one of this machine's.
    """
    reference = reference or project().reference
    theirs = load_rows(slug, reference, table)
    theirs = theirs.assign(where=f"reference: {value_label(reference)}")
    if machine == reference:
        return theirs
    rows = load_rows(slug, machine, table).assign(where=f"this machine: {machine}")
    if sharing:
        theirs = theirs.merge(rows[list(sharing)].drop_duplicates(), on=list(sharing))
    frames = [frame for frame in (theirs, rows) if len(frame)]
    return pd.concat(frames or [theirs], ignore_index=True)


def beside_reference(rows: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """This machine's rows, and what the reference took for the same, after the longest of its warm-ups.

    Returns the rows; if any has a partner, with `reference_ms`, its median, and `reference_status`.
    """
    keys = [name for name in _same_measurement() if name in rows and name in theirs]
    theirs = longest_warmup(theirs).reindex(columns=keys + ["p50_ms", "status"])
    theirs = theirs.rename(columns={"p50_ms": "reference_ms", "status": "reference_status"})
    both = rows.merge(theirs, on=keys, how="left")
    return both if both["reference_status"].notna().any() else rows


def _same_measurement() -> list[str]:
    """Rows that differ in none of these columns measured the same."""
    return [name for name in schema().keys if name != "warmup_steps"]


def times_in(frame: pd.DataFrame) -> list[str]:
    """The columns of times that rows of `beside_reference` have, for a table."""
    return [name for name in ("p50_ms", "reference_ms") if name in frame]


def longest_warmup(frame: pd.DataFrame) -> pd.DataFrame:
    """Of rows that differ in their warm-up alone the one with the longest: they are one point of a plot."""
    if "warmup_steps" not in frame:
        return frame
    keys = [name for name in _same_measurement() + ["machine"] if name in frame]
    by_warmup = frame.sort_values("warmup_steps", kind="stable")
    return by_warmup.drop_duplicates(keys, keep="last").sort_index()


def published_rows(name: str) -> pd.DataFrame:
    """A published table, and `where` each row is from."""
    frame = published(name)
    names = frame[[column for column in ("gpu", "source") if column in frame]]
    return frame.assign(where="published: " + names.agg(", ".join, axis=1))
