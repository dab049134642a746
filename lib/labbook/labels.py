"""How columns, names and numbers are written: the same on every axis, in every table and sentence."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pandas as pd

from cs336_systems import names
from cs336_systems.configs import MODEL_SIZES
from cs336_systems.measure.kernel_names import CLASSES
from labbook.schema import COLUMNS

MISSING = "–"

# What stands in the place of a number that a row does not have.
STATUS_LABELS = {"oom": "OOM", "error": "error", "skipped": "skipped"}

# Of a profiled model: what the time is a share of, and the parts of attention.
SCOPES = ("inference", "forward + backward", "training step")
ATTENTION_PARTS = ("scores", "scale and mask", "softmax", "values")
VARIANTS = tuple(
    how.label + matmuls
    for matmuls in ("", ", TF32", ", bfloat16")
    for how in names.MODEL_IMPLEMENTATIONS.values()
)


def _family(values: Iterable[str], colors: str) -> dict[str, names.Named]:
    pairs = zip(values, colors.split(), strict=True)
    return {value: names.Named(value, getattr(names, color)) for value, color in pairs}


# The values that a column can have, in order, each with its label and colour. A column of several families is
# drawn with the one that knows most of its values.
FAMILIES: dict[str, tuple[Mapping[str, names.Named], ...]] = {
    "implementation": (
        *(names.ATTENTION, names.MODEL_IMPLEMENTATIONS, names.WEIGHTED_SUMS),
        *(names.WRAPPERS, names.SHARDINGS, names.STEP_KERNELS, names.FULL_STEPS),
    ),
    "attention": (names.ATTENTION,),
    "wrapper": (names.WRAPPERS, names.SHARDINGS),
    "collective": (names.COLLECTIVES,),
    "dtype": (names.DTYPES,),
    "pass": (names.PASSES,),
    "class": (_family(CLASSES, "BLUE GREEN VERMILLION PURPLE SKY ORANGE YELLOW BROWN BLACK WINE GREY"),),
    "category": (names.CATEGORIES,),
    "scope": (_family(SCOPES, "BLUE VERMILLION GREEN"),),
    "part": (_family(ATTENTION_PARTS, "BLUE VERMILLION GREEN ORANGE"),),
    # One code, compiled or not, with matmuls of a dtype; who wrote an entry of a leaderboard.
    "variant": (_family(VARIANTS, "BLUE VERMILLION ORANGE SKY PURPLE GREEN BROWN BLACK WINE"),),
    "whose": (_family(("ours", "PyTorch's own", "others, published"), "GREEN BLACK GREY"),),
}
_LABELS = {
    value: named.label
    for families in FAMILIES.values()
    for family in families
    for value, named in family.items()
} | {"h200": "H200", "sqrt_n": "every √N"}

_SIZES = sorted(
    (c for sizes in MODEL_SIZES.values() for c in sizes.values()), key=lambda c: c.num_layers * c.d_model**2
)
_ORDERS: dict[str, Sequence[Hashable]] = {
    "model_size": tuple(dict.fromkeys(config.name for config in _SIZES)),
    "model": tuple(config.label for config in _SIZES),
}

# Where a column's own name, made readable, would not do.
_COLUMNS = {
    "std_ms": "standard deviation (ms)",
    "mean_ms": "mean time (ms)",
    "p50_ms": "median time (ms)",
    "reference_ms": "median on the reference machine (ms)",
    "step_ms": "time of the step (ms)",
    "no_comm_ms": "without communication (ms)",
    "compile_s": "time to compile (s)",
    "total_ms": "total time (ms)",
    "size_mib": "memory (MiB)",
    "context_length": "context length (tokens)",
    "d_head": "head dimension",
    "is_causal": "causal",
    "num_rows": "rows",
    "world_size": "processes",
    "step_index": "step",
    "sm_clock_mhz": "SM clock (MHz)",
    "message_mb": "size of the message (MB)",
    "warmup_steps": "warm-up steps",
    "where": "machine",
}

# In front of a number that would not say what it is: "warm-up 5" in a legend or above a panel.
_SHORT = {"context_length": "context", "batch_size": "batch", "d_head": "d =", "warmup_steps": "warm-up"}
_SHORT |= {"world_size": "processes"}

# What the last part of a column's name says of its unit: in the schema, and of what is computed from rows.
UNITS = {name.rpartition("_")[2]: column.unit for name, column in COLUMNS.items() if column.unit}
UNITS |= {"us": "µs", "kib": "KiB", "gib": "GiB", "gb": "GB", "tflops": "TFLOP/s", "percent": "%"}


def column_label(column: str) -> str:
    """A column's name for an axis or a header, with its unit: "peak_memory_mib" -> "peak memory (MiB)"."""
    if column in _COLUMNS:
        return _COLUMNS[column]
    name, _, unit = column.rpartition("_")
    if name and unit in UNITS:
        return f"{name.replace('_', ' ')} ({UNITS[unit]})"
    return column.replace("_", " ")


def value_label(value: object, column: str | None = None) -> str:
    """A key's value for a legend, a tick or a cell; context lengths as 512 or 16K."""
    if column == "where":
        return machine_label(value)
    if isinstance(value, str):
        return _LABELS.get(value, value)
    if pd.isna(value):
        return MISSING
    if column == "context_length":
        return context_label(value)
    if column == "num_rows":
        return f"{value:,.0f}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def named_value(column: str, value: object) -> str:
    """A value that stands alone: text as it is, a number named: "context 512", "bucket size 25 MB"."""
    text, name = value_label(value, column), _SHORT.get(column, column.removeprefix("is_").replace("_", " "))
    if isinstance(value, str):
        return text
    if pd.api.types.is_bool(value):
        return name if value else f"not {name}"
    if column in COLUMNS and (unit := COLUMNS[column].unit):
        return f"{name.rpartition(' ')[0]} {text} {unit}"
    return f"{name} {text}"


def machine_label(where: str) -> str:
    """ "reference: H200" -> "H200 (reference)"."""
    role, _, name = where.partition(": ")
    return f"{name} ({role})" if name else role


def context_label(tokens: float) -> str:
    """128 -> "128", 1024 -> "1K", 16384 -> "16K"."""
    return f"{int(tokens) // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


def family_of(values: Iterable[Hashable], column: str | None) -> dict[Hashable, names.Named]:
    """What is known of a column's values, by name and by label; of several families the best fitting."""
    distinct = set(values)
    families = [{**{named.label: named for named in f.values()}, **f} for f in FAMILIES.get(column or "", ())]
    return max(families, key=lambda family: len(distinct & set(family)), default={})


def ordered(values: Iterable[Hashable], column: str | None = None) -> list:
    """The distinct values in the order a reader expects: small before large, forward before backward."""
    distinct = [value for value in dict.fromkeys(values) if not pd.isna(value)]
    family = [named.label for named in family_of(distinct, column).values()]
    order = list(dict.fromkeys([*_ORDERS.get(column or "", ()), *family]))
    if order:
        known = {value: value if value in order else value_label(value) for value in distinct}
        return sorted(distinct, key=lambda v: order.index(known[v]) if known[v] in order else len(order))
    return sorted(distinct) if all(not isinstance(value, str) for value in distinct) else distinct


def significant(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, never in powers of ten: 0.0635, 33.3, 16,500.

    Below 10,000 all digits before the point are shown, as tables do: 4,417.
    """
    if pd.isna(value):
        return MISSING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if abs(value) < 1e4:
        decimals = max(decimals, 0)
    rounded = round(float(value), decimals)
    return f"{rounded:,.{max(decimals, 0)}f}"
