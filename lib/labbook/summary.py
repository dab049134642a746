"""What a saved row says, in a line: "plain, context 512, d = 64, float32, forward: 1.23 ms"."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from labbook.labels import UNITS, named_value, significant
from labbook.rows import TABLES


def row_lines(rows: Sequence[Mapping[str, Any]], table: str) -> list[str]:
    """What was measured and what came out: a line for each row, one for all of a recording."""
    schema = TABLES[table]
    if rows and schema.group and rows[0].get("status", "ok") != "ok":
        return [f"{_measured(rows[0], schema.group)}: {_outcome(rows[0], schema.values)}"]
    if rows and schema.group:
        return [f"{_measured(rows[0], schema.group)}: {len(rows)} rows"]
    return [f"{_measured(row, schema.keys)}: {_outcome(row, schema.values)}" for row in rows]


def _measured(row: Mapping[str, Any], keys: Iterable[str]) -> str:
    implied = ("d_model", "num_heads") if "model_size" in keys else ()
    told = [name for name in keys if name not in implied and not pd.isna(row.get(name))]
    return ", ".join(named_value(name, row[name]) for name in told)


def _outcome(row: Mapping[str, Any], values: Iterable[str]) -> str:
    if row.get("status", "ok") != "ok":
        return row["status"] + (f" ({row['reason']})" if row.get("reason") else "")
    name = next((name for name in ("p50_ms", *values) if not pd.isna(row.get(name))), "")
    if not name:
        return "saved"
    value = row[name] if isinstance(row[name], str) else significant(row[name])
    return f"{value} {UNITS.get(name.rpartition('_')[2], '')}".rstrip()
