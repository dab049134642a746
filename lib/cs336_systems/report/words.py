"""How columns, names and numbers are written: the same words on every axis, in every table and sentence."""

import math
from collections.abc import Hashable, Iterable, Sequence

import pandas as pd

from cs336_systems.configs import MODEL_SIZES
from cs336_systems.measure.schema import DTYPES, PASSES

MISSING = "–"

# What stands in the place of a number that a row does not have.
STATUS_WORDS = {"oom": "OOM", "error": "error", "skipped": "skipped"}

_VALUES = {
    "forward_backward": "forward + backward",
    "train_step": "train step",
    "tf32": "TF32",
    "sdpa": "SDPA",
    "sdpa_cudnn": "cuDNN",
    "sdpa_flash": "FlashAttention-2",
    "sdpa_efficient": "SDPA, efficient",
    "flex": "FlexAttention",
    "compiled_blocks": "compiled per block",
    "flash_pytorch": "Flash (PyTorch)",
    "flash_triton": "Flash (Triton)",
    "flash_compiled": "Flash (compiled backward)",
    "h200": "H200",
}

# Where the column's own name, made readable, would not do.
_COLUMNS = {
    "std_ms": "standard deviation (ms)",
    "mean_ms": "mean time (ms)",
    "p20_ms": "20th percentile of time (ms)",
    "p50_ms": "median time (ms)",
    "p80_ms": "80th percentile of time (ms)",
    "reference_ms": "median on the reference machine (ms)",
    "step_ms": "time of the step (ms)",
    "compile_s": "time to compile (s)",
    "total_ms": "total time (ms)",
    "size_mib": "memory (MiB)",
    "context_length": "context length (tokens)",
    "d_head": "head dimension",
    "is_causal": "causal",
    "num_rows": "rows",
    "world_size": "processes",
    "sm_clock_mhz": "SM clock (MHz)",
    "power_w": "power (W)",
    "message_mb": "size of the message (MB)",
    "warmup_steps": "warm-up steps",
    "where": "machine",
}

# In front of a number that would not say what it is: "warm-up 5" in a legend or above a panel.
_SHORT = {
    "context_length": "context",
    "batch_size": "batch",
    "d_head": "d =",
    "warmup_steps": "warm-up",
    "world_size": "processes",
}

UNITS = {
    "us": "µs",
    "ms": "ms",
    "s": "s",
    "kib": "KiB",
    "mib": "MiB",
    "gib": "GiB",
    "mb": "MB",
    "gb": "GB",
    "bytes": "bytes",
}
UNITS |= {"gbps": "GB/s", "tflops": "TFLOP/s", "percent": "%"}

# Of a profiled model: what the time is a share of, and the parts of attention.
SCOPES = ("inference", "forward + backward", "training step")
ATTENTION_PARTS = ("scores", "scale and mask", "softmax", "values")

_SIZES = sorted(
    (c for sizes in MODEL_SIZES.values() for c in sizes.values()), key=lambda c: c.num_layers * c.d_model**2
)

# Columns whose values have an order of their own; numbers are sorted, everything else stays as it came.
_ORDERS: dict[str, Sequence[Hashable]] = {
    "model_size": tuple(dict.fromkeys(config.name for config in _SIZES)),
    "model": tuple(config.label for config in _SIZES),
    "pass": PASSES,
    "dtype": DTYPES,
    "scope": SCOPES,
    "part": ATTENTION_PARTS,
    "implementation": (
        "eager",
        "reference",
        "compiled",
        "compiled_blocks",
        "sdpa",
        "flash_pytorch",
        "flash_compiled",
        "flash_triton",
    ),
    "wrapper": ("one process", "naive", "flat", "overlapped", "bucketed", "PyTorch's DDP"),
    "collective": ("all-reduce", "all-gather", "reduce-scatter", "broadcast"),
    "peer": (
        "reference",
        "compiled",
        "sdpa_efficient",
        "sdpa_flash",
        "flex",
        "sdpa_cudnn",
        "flash_triton",
    ),
    "variant": tuple(
        f"{implementation}{dtype}"
        for dtype in ("", ", TF32")
        for implementation in ("eager", "compiled", "compiled per block")
    ),
}


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
        return place_label(value)
    if isinstance(value, str):
        return _VALUES.get(value, value)
    if pd.isna(value):
        return MISSING
    if column == "context_length":
        return context_label(value)
    if column == "num_rows":
        return f"{value:,.0f}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def named_value(column: str, value: object) -> str:
    """A value that stands alone: text as it is, a number with its column's short name ("context 512")."""
    text = value_label(value, column)
    return text if isinstance(value, str) else f"{_SHORT.get(column, column.replace('_', ' '))} {text}"


def place_label(where: str) -> str:
    """ "reference: H200" -> "H200 (reference)"."""
    role, _, name = where.partition(": ")
    return f"{name} ({role})" if name else role


def context_label(tokens: float) -> str:
    """128 -> "128", 1024 -> "1K", 16384 -> "16K"."""
    return f"{int(tokens) // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


def ordered(values: Iterable[Hashable], column: str | None = None) -> list:
    """The distinct values in the order a reader expects: small before large, forward before backward."""
    distinct = [value for value in dict.fromkeys(values) if not pd.isna(value)]
    order = _ORDERS.get(column or "", ())
    if order:
        return sorted(distinct, key=lambda value: order.index(value) if value in order else len(order))
    if all(isinstance(value, int | float) or hasattr(value, "dtype") for value in distinct):
        return sorted(distinct)
    return distinct


def significant(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, never in powers of ten: 0.0635, 33.3, 1,250."""
    if pd.isna(value):
        return MISSING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(float(value), decimals)
    return f"{rounded:,.{max(decimals, 0)}f}"
