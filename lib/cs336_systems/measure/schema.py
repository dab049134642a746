"""The vocabulary of rows: every column there is, with its unit. A new column is one line here."""

import difflib
import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

PASSES = ("forward", "backward", "forward_backward", "train_step")
DTYPES = ("float32", "tf32", "bfloat16", "float16")
STATUSES = ("ok", "oom", "skipped", "error")


@dataclass(frozen=True)
class Column:
    """One column: what was measured (key), what came out (value), or where it comes from (provenance)."""

    kind: Literal["key", "value", "provenance"]
    type: type
    unit: str
    description: str
    allowed: tuple[str, ...] = ()
    minimum: float | None = 0
    digits: int = 6  # significant digits kept in the file

    def check(self, value: Any) -> int | float | str | bool | None:
        """Return the value as this column stores it; None, NaN and pandas' NA mean "empty".

        Raises:
            ValueError: what is allowed.
        """
        if pd.api.types.is_scalar(value) and pd.isna(value):
            return None
        is_bool = isinstance(value, bool | np.bool_)
        is_number = isinstance(value, numbers.Real) and not is_bool and math.isfinite(value)
        if self.type is str and isinstance(value, str):
            return self._allowed(_one_line(value)) or None
        if self.type is bool and is_bool:
            return bool(value)
        if self.type is int and is_number and float(value).is_integer():
            return int(self._within(value))
        if self.type is float and is_number:
            return float(f"{self._within(value):.{self.digits}g}")
        raise ValueError(f"allowed: {_TYPE_NAMES[self.type]}")

    def parse(self, text: str) -> int | float | str | bool | None:
        """Read a CSV field; errors as in `check`."""
        if text == "":
            return None
        try:
            value = _PARSERS[self.type](text)
        except (KeyError, ValueError):
            raise ValueError(f"allowed: {_TYPE_NAMES[self.type]}") from None
        return self.check(value)

    def format(self, value: Any) -> str:
        """Write a CSV field: short, and the same text for the same value."""
        if value is None:
            return ""
        if self.type is float:
            return format(value, f".{self.digits}g")
        return str(value).lower() if self.type is bool else str(value)

    def order(self, value: Any) -> tuple:
        """Sort key: empty first, numbers by size, listed names in the order of the list."""
        if value is None:
            return (0,)
        return (1, self.allowed.index(value) if self.allowed else value)

    def _allowed(self, value: str) -> str:
        if self.allowed and value not in self.allowed:
            raise ValueError(f"allowed: {', '.join(self.allowed)}")
        return value

    def _within(self, value: Any) -> Any:
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"allowed: {self.minimum:g} or more")
        return value


_TYPE_NAMES = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
_PARSERS = {int: int, float: float, str: str, bool: {"true": True, "false": False}.__getitem__}


def _one_line(text: str) -> str:
    """The text with line breaks and control characters as single spaces: a row stays one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def unknown_column(name: Any) -> str:
    """Say what is wrong with a column: another unit of a known quantity, a typo, or neither."""
    stem = str(name).rpartition("_")[0]
    other_unit = [column for column in COLUMNS if stem and column.rpartition("_")[0] == stem]
    close = difflib.get_close_matches(str(name), COLUMNS, n=2)
    if other_unit:
        return f"column {name!r}: the vocabulary has {', '.join(other_unit)}, and one unit a quantity"
    if close:
        return f"column {name!r} is not in the vocabulary; it has {', '.join(close)}"
    return f"column {name!r} is not in the vocabulary; allowed: {', '.join(COLUMNS)}"


def _key(type_: type, description: str, unit: str = "", allowed: tuple[str, ...] = ()) -> Column:
    return Column("key", type_, unit, description, allowed)


def _value(type_: type, description: str, unit: str = "", **options: Any) -> Column:
    return Column("value", type_, unit, description, **options)


def _provenance(description: str) -> Column:
    return Column("provenance", str, "", description)


# In the order of a file's columns; the order of the keys is also the order of its rows.
COLUMNS: dict[str, Column] = {
    "implementation": _key(str, "what ran: eager, compiled, compiled_blocks, or an attention implementation"),
    "attention": _key(str, "attention implementation inside a model"),
    "edition": _key(int, "edition of the assignment"),
    "model_size": _key(str, "name of the model's size in its edition"),
    "d_model": _key(int, "width of the residual stream"),
    "num_heads": _key(int, "attention heads"),
    "num_rows": _key(int, "rows of a matrix"),
    "batch_size": _key(int, "sequences in a batch"),
    "context_length": _key(int, "tokens in a sequence"),
    "d_head": _key(int, "width of one attention head"),
    "is_causal": _key(bool, "a query sees only keys up to its own position"),
    "dtype": _key(
        str, "tf32 is float32 with TF32 matrix products; 16 bits are autocast in a model", allowed=DTYPES
    ),
    "world_size": _key(int, "processes that take part"),
    "backend": _key(str, "communication backend"),
    "bucket_size_mb": _key(float, "largest gradient bucket", "MB"),
    "message_mb": _key(float, "largest buffer of a collective on one rank", "MB"),
    "case": _key(str, "which variant, where no other key says it"),
    "tensor": _key(str, "name of the tensor looked at"),
    "profiler": _key(str, "what saw the kernels: nsys, torch cuda or torch cpu"),
    "rank": _key(int, "which process of a group"),
    "lane": _key(str, "compute or communication, see measure.overlap.LANES"),
    "span": _key(int, "number of a stretch of time in its lane, from 0"),
    "range": _key(str, "path of the named ranges around it; a star stands for every layer"),
    "kernel": _key(str, "short name of a kernel, or of an operator on a CPU"),
    "class": _key(str, "kind of kernel, see measure.kernel_names.CLASSES"),
    "category": _key(str, "what memory is used for, see measure.allocations.CATEGORIES"),
    "code": _key(str, "line of code that allocated"),
    "capability": _key(int, "compute capability that a kernel is compiled for: 80, 90, 100"),
    "block_m": _key(int, "queries in a tile"),
    "block_n": _key(int, "keys in a tile"),
    "num_warps": _key(int, "warps of a program"),
    "num_stages": _key(int, "stages of the software pipeline"),
    "pass": _key(str, "what one step does", allowed=PASSES),
    "warmup_steps": _key(int, "steps run before the measured ones"),
    "step": _key(int, "number of the step in its trace, from 0, warm-up included"),
    "mean_ms": _value(float, "mean time of a step", "ms"),
    "std_ms": _value(float, "sample standard deviation over the steps", "ms"),
    "p20_ms": _value(float, "20th percentile over the steps", "ms"),
    "p50_ms": _value(float, "median over the steps", "ms"),
    "p80_ms": _value(float, "80th percentile over the steps", "ms"),
    "steps": _value(int, "measured steps"),
    "step_ms": _value(float, "time of this one step", "ms"),
    "peak_memory_mib": _value(float, "most memory that tensors held during the steps", "MiB"),
    "requested_memory_mib": _value(float, "the same before the allocator rounded sizes up", "MiB"),
    "memory_before_backward_mib": _value(float, "memory in use between forward and backward", "MiB"),
    "saved_for_backward_mib": _value(float, "distinct storage that autograd keeps for backward", "MiB"),
    "compile_s": _value(float, "first call less a steady step", "s"),
    "algorithm_bandwidth_gbps": _value(float, "message over time in a collective", "GB/s"),
    "bus_bandwidth_gbps": _value(float, "bytes over each link and second in a collective", "GB/s"),
    "communication_ms": _value(float, "communication of a step with nothing to hide behind", "ms"),
    "alone_ms": _value(float, "median step without its communication", "ms"),
    "exposed_communication_ms": _value(float, "median step less alone_ms", "ms", minimum=None),
    "profiled_communication_ms": _value(float, "part of a profiled step with a communication kernel", "ms"),
    "profiled_exposed_ms": _value(float, "... and without any other kernel", "ms"),
    "profiled_tail_ms": _value(float, "from the end of backward to that of communication, profiled", "ms"),
    "overlap_share": _value(float, "part of the profiled communication that is hidden behind computing"),
    "start_ms": _value(float, "start of a span, since its step began", "ms", minimum=None),
    "end_ms": _value(float, "end of a span, since its step began", "ms"),
    "calls": _value(float, "launches in a step"),
    "total_ms": _value(float, "time of all those launches in a step", "ms"),
    "host_ms": _value(float, "time that a range was open on the host", "ms"),
    "device_span_ms": _value(float, "from the start of a range's first kernel to the end of its last", "ms"),
    "device_busy_ms": _value(float, "part of the span with a kernel running", "ms"),
    "device_idle_share": _value(float, "part of the span with none"),
    "at_ms": _value(float, "time since the recording began", "ms"),
    "size_mib": _value(float, "memory held", "MiB"),
    "registers": _value(int, "registers of a thread"),
    "spilled_bytes": _value(int, "bytes that a thread keeps in memory for want of registers", "bytes"),
    "shared_bytes": _value(int, "shared memory of a program", "bytes"),
    "shared_limit_bytes": _value(int, "shared memory that the chip can give one program", "bytes"),
    "sm_clock_mhz": _value(float, "median clock of the multiprocessors during the steps", "MHz"),
    "power_w": _value(float, "median power that the GPU drew during the steps", "W"),
    "result": _value(float, "a computed number", minimum=None, digits=9),
    "observed_dtype": _value(str, "dtype that a tensor was found to have"),
    "status": _value(str, "how the measurement ended", allowed=STATUSES),
    "reason": _value(str, "why the status is not ok"),
    "machine": _provenance("slug of the machine, the name of its folder"),
    "gpu": _provenance("name of the GPU, or none"),
    "torch": _provenance("version of torch"),
    "triton": _provenance("version of triton, or none"),
    "measured_at": _provenance("when the row was saved, UTC"),
    "commit": _provenance("commit of this repository"),
}
KEYS = tuple(name for name, column in COLUMNS.items() if column.kind == "key")
PROVENANCE = tuple(name for name, column in COLUMNS.items() if column.kind == "provenance")
TIMES = tuple(name for name, column in COLUMNS.items() if column.unit in ("ms", "s"))
