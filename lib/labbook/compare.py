"""What may be compared: rows of one place, rows that differ in one thing, rows of several machines."""

from collections.abc import Iterable, Sequence

import pandas as pd

from labbook.labels import SYNONYMS, UNITS, value_label
from labbook.rows import KEYS, VALUES, load_rows, published

# Rows that differ in nothing else measured the same.
_SAME = [name for name in KEYS if name != "warmup_steps"]


def key_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that say what was measured and where, as opposed to what came out."""
    values = {*VALUES, "status", "reason", "run"} | {
        name for name in frame if name.endswith("_status")
    }
    values |= {
        name for name in frame if frame[name].dtype.kind == "f" or name.rpartition("_")[2] in UNITS
    }
    return [name for name in frame if name in (*KEYS, "machine", "gpu") or name not in values]


def require_one_row_each(frame: pd.DataFrame, *by: str | None) -> None:
    """Raises ValueError when two rows would be drawn in one place, naming what tells them apart."""
    by = list(dict.fromkeys([*filter(None, by), *(["where"] if "where" in frame else [])]))
    for key, group in frame.groupby(by, dropna=False, sort=False):
        if len(group) > 1:
            place = ", ".join(f"{column}={value}" for column, value in zip(by, key, strict=True))
            varying = varying_values(group, key_columns(group)) or "nothing: they are duplicates"
            raise ValueError(f"{len(group)} rows share {place}; they differ in {varying}")


def varying_values(group: pd.DataFrame, columns: Iterable[str]) -> str:
    """Those of the columns that have several values, with the first of these: "batch_size (8, 4)"."""
    values = {column: group[column].unique() for column in columns}
    return "; ".join(f"{c} ({', '.join(map(str, v[:4]))})" for c, v in values.items() if len(v) > 1)


def compared(frame: pd.DataFrame, hue: str, baseline: object, y: str) -> pd.DataFrame:
    """The rows that the baseline has an equal of, in every key but `hue` and its synonyms.

    Returns the rows with `baseline` (its y), `baseline_status` and `ratio`, baseline / y.
    Raises ValueError: there are no such rows; the message names what they differ in.
    """
    same = next((names for names in SYNONYMS if hue in names), {hue})
    keys = [column for column in key_columns(frame) if column not in same]
    base, others = frame[frame[hue] == baseline], frame[frame[hue] != baseline]
    columns = {y: "baseline", "status": "baseline_status"}
    partner = base[[*keys, *(c for c in columns if c in base)]].rename(columns=columns)
    joined = others.merge(partner, on=keys)
    if joined.empty and len(others):
        varying = varying_values(frame, keys)
        raise ValueError(
            f"no row can be divided by one of {hue}={baseline}: they differ in {varying}"
        )
    return joined.assign(ratio=joined["baseline"] / joined[y])


def side_by_side(
    slug: str, machine: str, reference: str = "h200", *, table: str, sharing: Sequence[str] = ()
) -> pd.DataFrame:
    """The reference's rows and this machine's, with a column `where` that plots understand.

    machine: slug of this machine; where it is the reference, its rows appear once.
    sharing: of the reference only rows that agree in these columns with one of this machine's.
    """
    places = {f"reference: {value_label(reference)}": reference}
    if machine != reference:
        places[f"this machine: {machine}"] = machine
    frames = [load_rows(slug, name, table).assign(where=where) for where, name in places.items()]
    if sharing and len(frames) == 2:
        frames[0] = frames[0].merge(frames[1][list(sharing)].drop_duplicates(), on=list(sharing))
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def beside_reference(mine: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """This machine's rows, and what the reference took for the same, after the longest of its warm-ups.

    Returns the rows; if any has a partner, with `reference_ms`, its median, and `reference_status`.
    """
    keys = [name for name in _SAME if name in mine and name in theirs]
    theirs = longest_warmup(theirs).reindex(columns=[*keys, "p50_ms", "status"])
    theirs = theirs.rename(columns={"p50_ms": "reference_ms", "status": "reference_status"})
    both = mine.merge(theirs, on=keys, how="left")
    return both if both["reference_status"].notna().any() else mine


def times_in(frame: pd.DataFrame) -> list[str]:
    """The columns of times that rows of `beside_reference` have, for a table."""
    return [name for name in ("p50_ms", "reference_ms") if name in frame]


def longest_warmup(frame: pd.DataFrame) -> pd.DataFrame:
    """Of rows that differ in their warm-up alone the one with the longest: they are one point of a plot."""
    if "warmup_steps" not in frame:
        return frame
    keys = [name for name in (*_SAME, "machine") if name in frame]
    return (
        frame.sort_values("warmup_steps", kind="stable")
        .drop_duplicates(keys, keep="last")
        .sort_index()
    )


def published_rows(name: str) -> pd.DataFrame:
    """A published table, and `where` each row is from."""
    frame = published(name)
    told = [frame[column] for column in ("gpu", "source") if column in frame]
    return frame.assign(
        where=["published: " + ", ".join(parts) for parts in zip(*told, strict=True)]
    )
