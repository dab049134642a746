"""What may be compared: rows of one place, rows that differ in one thing, rows beside others'."""

from collections.abc import Iterable, Sequence

import pandas as pd

from labbook.schema import schema


def require_one_row_each(frame: pd.DataFrame, *by: str | None) -> None:
    """Raises ValueError when two rows would be drawn in one place, naming what tells them apart."""
    named = filter(None, by)
    columns = list(dict.fromkeys(named))
    results = schema().values | {"status", "reason", "run"}
    others = [name for name in frame if name not in results]
    for key, group in frame.groupby(columns, dropna=False, sort=False):
        if len(group) == 1:
            continue
        place = ", ".join(map("{}={}".format, columns, key))
        varying = varying_values(group, others) or "nothing: they are duplicates"
        raise ValueError(f"{len(group)} rows share {place}; they differ in {varying}")


def varying_values(group: pd.DataFrame, columns: Iterable[str]) -> str:
    """Those of the columns that have several values, with the first of these: "batch_size (8, 4)"."""
    texts = []
    for column in columns:
        values = group[column].unique()
        if len(values) > 1:
            texts.append(f"{column} ({', '.join(map(str, values[:4]))})")
    return "; ".join(texts)


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
    both = theirs.astype(numbers).merge(ours.astype(numbers), on=keys)
    both = both.dropna(subset=["theirs", "ours"]).eval("ratio = theirs / ours")
    # A gap in a key made floats of its whole numbers.
    both[keys] = both[keys].convert_dtypes()
    return both[keys + ["theirs", "ours", "ratio", "card"]]
