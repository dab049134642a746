"""The schema of rows: every column with its one meaning, and every table with the columns that it has.

A table is the file `figures/<machine>/<slug>/<table>.csv`: its keys say what was measured, its values what
came out. A new column is a line in COLUMNS, a new table an entry in TABLES.
"""

import math
import numbers
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

STATUSES = ("ok", "oom", "skipped", "error")
_PROTOCOLS = ("do_bench", "cuda_graph", "wall_clock", "leaderboard")
_DTYPES = ("float32", "tf32", "bfloat16", "float16")
_PASSES = ("forward", "backward", "forward_backward", "train_step")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_MOMENTS = ("initialised", "before step", "after step", "peak")
_LANES = ("compute", "communication", "NVTX", "CUDA API", "kernels")
_COMPARED = ("weights", "replicas")


@dataclass(frozen=True)
class Column:
    """One column: its type, its unit, what it means, the values that it may have."""

    type: type
    description: str
    unit: str = ""
    allowed: tuple[str, ...] = ()
    minimum: float | None = 0
    digits: int = 6  # significant digits of a float that the file keeps

    def check(self, value: Any) -> int | float | str | bool | None:
        """The value as the column stores it; None, NaN and pandas' NA mean "empty".

        Raises:
            ValueError: what is allowed.
        """
        if pd.api.types.is_scalar(value) and pd.isna(value):
            return None
        is_bool = isinstance(value, bool | np.bool_)
        is_number = isinstance(value, numbers.Real) and not is_bool and math.isfinite(value)
        if self.type is str and isinstance(value, str):
            text = " ".join(value.split())  # a row is one line
            if text and self.allowed and text not in self.allowed:
                raise ValueError(f"allowed: {', '.join(self.allowed)}")
            return text or None
        if self.type is bool and is_bool:
            return bool(value)
        if self.type in (int, float) and is_number and (self.type is float or float(value).is_integer()):
            if self.minimum is not None and value < self.minimum:
                raise ValueError(f"allowed: {self.minimum:g} or more")
            return int(value) if self.type is int else float(f"{value:.{self.digits}g}")
        raise ValueError(f"allowed: {_TYPE_NAMES[self.type]}")

    def format(self, value: Any) -> str:
        """A checked value as a CSV field."""
        if value is None:
            return ""
        if self.type is float:
            return format(value, f".{self.digits}g")
        return str(value).lower() if self.type is bool else str(value)

    def parse(self, text: str) -> int | float | str | bool | None:
        """The value of a CSV field. Errors as in `check`."""
        value: Any = text or None
        if self.type is bool:
            value = {"true": True, "false": False}.get(text, value)
        elif text:
            with suppress(ValueError):
                value = self.type(text)
        return self.check(value)

    def series(self, values: list, index: pd.Index) -> pd.Series:
        """Parsed values in a plain numpy dtype: whole numbers with gaps are floats, other gaps None."""
        plain = self.type is float or (self.type is not str and None not in values)
        dtype = self.type if plain else float if self.type is int else object
        return pd.Series(values, index, dtype=dtype)

    def order(self, values: pd.Series) -> pd.Series:
        """What to sort a loaded column by: listed names in the order of the list, the rest by itself."""
        if self.allowed:
            return values.map({name: place for place, name in enumerate(self.allowed)})
        return values.astype(float) if self.type is bool else values


_TYPE_NAMES = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Table:
    """What a table has: keys, values and, in all of them, STATUS and PROVENANCE.

    group: the keys of one recording, where other keys (names of kernels) come out of the measurement: a new
    recording replaces all rows of an older one of its group. Without, a row replaces the one with its key.
    """

    keys: tuple[str, ...]
    values: tuple[str, ...]
    group: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.keys, *self.values, *STATUS, *PROVENANCE)


# fmt: off
COLUMNS: dict[str, Column] = {
    # What was measured.
    "implementation": Column(str, "what ran"),
    "attention": Column(str, "attention implementation inside a model"),
    "edition": Column(int, "edition of the assignment"),
    "model_size": Column(str, "name of the model's size in its edition"),
    "d_model": Column(int, "width of the residual stream; of a weighted sum, the columns of its matrix"),
    "num_heads": Column(int, "attention heads"),
    "num_layers": Column(int, "blocks of a model that may have fewer than its size says"),
    "num_rows": Column(int, "rows of a matrix"),
    "most_partials": Column(int, "most lines of partial sums, one a program"),
    "batch_size": Column(int, "sequences in a batch"),
    "context_length": Column(int, "tokens in a sequence"),
    "d_head": Column(int, "width of one attention head"),
    "is_causal": Column(bool, "a query sees only keys up to its own position"),
    "dtype": Column(str, "tf32: float32, TF32 matmuls; 16 bits of a model: autocast", allowed=_DTYPES),
    "pass": Column(str, "what one step does", allowed=_PASSES),
    "warmup_steps": Column(int, "steps run before the measured ones"),
    "synchronized": Column(bool, "the clock stopped only when the step's kernels were done"),
    "step_index": Column(int, "number of a step in its run, from 0; of training, from 1"),
    "protocol": Column(str, "how a step was timed", allowed=_PROTOCOLS),
    "deterministic": Column(bool, "torch.use_deterministic_algorithms was on"),
    "accumulation": Column(str, "dtypes of an accumulator and of what is added to it"),
    "tensor": Column(str, "name of a tensor, or of the operation that saved it"),
    "strategy": Column(str, "which blocks of a model are checkpointed"),
    "world_size": Column(int, "processes that take part"),
    "backend": Column(str, "communication backend"),
    "rank": Column(int, "which process of a group"),
    "bucket_size_mb": Column(float, "largest gradient bucket", "MB"),
    "collective": Column(str, "collective operation", allowed=_COLLECTIVES),
    "message_mb": Column(float, "largest buffer of a collective on one rank", "MB"),
    "optimizer": Column(str, "optimizer of a training run"),
    "compared": Column(str, "weights with one process's, replicas with each other", allowed=_COMPARED),
    "profiler": Column(str, "what saw the kernels: nsys, torch cuda or torch cpu"),
    "range": Column(str, "path of the named ranges around it; a star stands for every layer"),
    "kernel": Column(str, "short name of a kernel, or of an operator on a CPU"),
    "class": Column(str, "kind of kernel, see measure.kernel_names.CLASSES"),
    "lane": Column(str, "what a span of time was spent on, or who recorded it", allowed=_LANES),
    "span": Column(int, "number of a span of time in its lane, from 0"),
    "stage": Column(str, "stage of a step: forward, backward, optimizer"),
    "point": Column(int, "number of a point of a timeline, from 0"),
    "category": Column(str, "what memory is used for, see measure.allocations.CATEGORIES"),
    "moment": Column(str, "moment of training; before and after are of its first step", allowed=_MOMENTS),
    "unit": Column(str, "what is gathered at once: a block, or the embedding or head around them"),
    "rank_by_size": Column(int, "place among the largest, from 0"),
    "kind": Column(str, "a tensor saved for backward, or a gradient", allowed=("saved", "gradient")),
    "module": Column(str, "module inside a block"),
    "code": Column(str, "line of code that allocated, as of the row's commit"),
    "capability": Column(int, "compute capability that a kernel is compiled for: 80, 90, 100"),
    "block_m": Column(int, "queries in a tile"),
    "block_n": Column(int, "keys in a tile"),
    "num_warps": Column(int, "warps of a program"),
    "num_stages": Column(int, "stages of the software pipeline"),
    "max_registers": Column(int, "most registers that the compiler may give a thread; empty: it decides"),
    "chunk": Column(int, "dimensions of a head that a score is made of at a time; empty: all"),
    "technique": Column(str, "optimisation that a version of a kernel adds to the one before it"),
    "rung": Column(int, "number of the version, from 0, the first"),
    # What came out.
    "mean_ms": Column(float, "mean time of a step", "ms"),
    "std_ms": Column(float, "sample standard deviation over the steps", "ms"),
    "p20_ms": Column(float, "20th percentile over the steps", "ms"),
    "p50_ms": Column(float, "median over the steps", "ms"),
    "p80_ms": Column(float, "80th percentile over the steps", "ms"),
    "steps": Column(int, "measured steps"),
    "step_ms": Column(float, "time of this one step", "ms"),
    "peak_memory_mib": Column(float, "most memory that tensors held during the steps", "MiB"),
    "requested_memory_mib": Column(float, "the same before the allocator rounded sizes up", "MiB"),
    "memory_before_backward_mib": Column(float, "memory in use between forward and backward", "MiB"),
    "saved_for_backward_mib": Column(float, "distinct storage that autograd keeps for backward", "MiB"),
    "compile_s": Column(float, "first call less a steady step", "s"),
    "recompute_ms": Column(float, "time to make it again in backward, for one block", "ms"),
    "recomputed_blocks": Column(int, "blocks whose forward runs again in backward"),
    "predicted_gain_low": Column(float, "time before over time after, predicted: at least"),
    "predicted_gain_high": Column(float, "... at most"),
    "kept": Column(bool, "the later versions have the technique too"),
    "why": Column(str, "the reason of the prediction"),
    "runs": Column(int, "runs whose results were compared bit by bit"),
    "distinct_results": Column(int, "different results among them"),
    "total": Column(float, "a sum", minimum=None, digits=9),
    "loss": Column(float, "cross-entropy, the mean over the batch, in nats", digits=9),
    "gradient_norm": Column(float, "2-norm of the whole gradient", digits=9),
    "max_difference": Column(float, "largest absolute difference of any weight", digits=9),
    "observed_dtype": Column(str, "dtype that a tensor was found to have"),
    "algorithm_bandwidth_gbps": Column(float, "message over time in a collective", "GB/s"),
    "bus_bandwidth_gbps": Column(float, "bytes over each link and second in a collective", "GB/s"),
    "communication_ms": Column(float, "communication of a step with nothing to hide behind", "ms"),
    "no_comm_ms": Column(float, "median step without its communication", "ms"),
    "exposed_communication_ms": Column(float, "median step less no_comm_ms", "ms", minimum=None),
    "profiled_communication_ms": Column(float, "part of a profiled step with a communication kernel", "ms"),
    "profiled_exposed_ms": Column(float, "... and without any other kernel", "ms"),
    "profiled_tail_ms": Column(float, "from the end of backward to that of communication, profiled", "ms"),
    "overlap_share": Column(float, "part of the profiled communication that is hidden behind computing"),
    "start_ms": Column(float, "start of a span, since its step began", "ms", minimum=None),
    "end_ms": Column(float, "end of a span, since its step began", "ms"),
    "calls": Column(float, "launches in a step, of kernels or of messages"),
    "issue_ms": Column(float, "the host's time for starting one message", "ms"),
    "total_ms": Column(float, "time of all those launches in a step", "ms"),
    "host_ms": Column(float, "time that a range was open on the host", "ms"),
    "device_span_ms": Column(float, "from the start of a range's first kernel to the end of its last", "ms"),
    "device_busy_ms": Column(float, "part of the span with a kernel running", "ms"),
    "device_idle_share": Column(float, "part of the span with none"),
    "event": Column(str, "a named range; what a call of CUDA does; the stage that launched kernels"),
    "depth": Column(int, "how many ranges are around a range, up to the step"),
    "at_ms": Column(float, "time since the recording began", "ms"),
    "size_mib": Column(float, "memory held", "MiB"),
    "predicted_mib": Column(float, "memory held, by the closed form", "MiB"),
    "sent_mb": Column(float, "sent by a rank, the mean over the ranks", "MB"),
    "predicted_sent_mb": Column(float, "the same by the closed form", "MB"),
    "needed_ms": Column(float, "when the GPU could have begun to use it, since the step began", "ms"),
    "count": Column(int, "tensors of that kind"),
    "registers": Column(int, "registers of a thread"),
    "spilled_bytes": Column(int, "bytes that a thread keeps in memory for want of registers", "bytes"),
    "shared_bytes": Column(int, "shared memory of a program", "bytes"),
    "shared_limit_bytes": Column(int, "shared memory that the chip can give one program", "bytes"),
    "sm_clock_mhz": Column(float, "median clock of the SMs during the steps", "MHz"),
    "power_w": Column(float, "median power that the GPU drew during the steps", "W"),
    "moved_mb": Column(float, "what a step must read and write at the least", "MB"),
    "gflop": Column(float, "floating-point operations of a step's matmuls, in billions"),
    "limit_ms": Column(float, "least time for that on this chip: memory or tensor cores at their peak", "ms"),
    "limit_share": Column(float, "limit_ms over the median time"),
    "status": Column(str, "how the measurement ended", allowed=STATUSES),
    "reason": Column(str, "why the status is not ok"),
    # Where it comes from.
    "machine": Column(str, "slug of the machine, the name of its folder"),
    "gpu": Column(str, "name of the GPU, or none"),
    "torch": Column(str, "version of torch"),
    "triton": Column(str, "version of triton, or none"),
    "kernels": Column(str, "digest of the sources of our attention kernels, where they ran"),
    "measured_at": Column(str, "when the rows were saved, UTC; the same for all rows of one save"),
    "commit": Column(str, "commit of this repository; ends in + where the library had uncommitted changes"),
}

STATUS = ("status", "reason")
PROVENANCE = ("machine", "gpu", "torch", "triton", "kernels", "measured_at", "commit")
TIMES = ("mean_ms", "std_ms", "p20_ms", "p50_ms", "p80_ms", "steps")
MODEL = (
    "implementation", "attention", "edition", "model_size", "d_model", "num_heads",
    "batch_size", "context_length", "dtype",
)

_ATTENTION = ("batch_size", "context_length", "d_head", "is_causal", "dtype")
_TILE = ("block_m", "block_n", "num_warps", "num_stages", "max_registers", "chunk")
_GROUP = ("world_size", "backend")
_FULL_STEP = (*MODEL, "num_layers", *_GROUP)
_RANK = (*MODEL, *_GROUP, "bucket_size_mb", "rank", "pass", "warmup_steps")
_STEP = (*MODEL, "pass")
_PROFILE = (*MODEL, "pass", "warmup_steps", "profiler")
_OVERLAP = ("profiled_communication_ms", "profiled_exposed_ms", "profiled_tail_ms", "overlap_share")

TABLES: dict[str, Table] = {
    "model_times": Table((*MODEL, "pass", "warmup_steps"), (*TIMES, "peak_memory_mib", "compile_s")),
    "cold_steps": Table(
        (*MODEL, "pass", "synchronized", "step_index"), ("step_ms",), (*MODEL, "pass", "synchronized")
    ),
    "attention_times": Table(
        ("implementation", *_ATTENTION, "pass", "warmup_steps"),
        (*TIMES, "peak_memory_mib", "memory_before_backward_mib", "saved_for_backward_mib", "compile_s"),
    ),
    "flash_times": Table(
        ("implementation", "protocol", "num_heads", *_ATTENTION, "pass"),
        (*TIMES, "peak_memory_mib", "sm_clock_mhz", "power_w"),
    ),
    "tile_times": Table(("kernel", "num_heads", *_ATTENTION, *_TILE), (*TIMES, "peak_memory_mib")),
    "ablation_times": Table(
        ("kernel", "technique", "rung", "num_heads", *_ATTENTION),
        (*TIMES, "peak_memory_mib", "predicted_gain_low", "predicted_gain_high", "kept", "why"),
    ),
    "determinism": Table(
        ("implementation", "batch_size", "context_length", "d_head", "dtype", "pass", "deterministic"),
        ("runs", "distinct_results"),
    ),
    "weighted_sum_launches": Table(
        ("implementation", "num_rows", "d_model", "most_partials"), (*TIMES, "peak_memory_mib")
    ),
    "weighted_sum_times": Table(
        ("implementation", "num_rows", "d_model", "dtype", "pass"), (*TIMES, "peak_memory_mib")
    ),
    "step_kernel_times": Table(
        ("kernel", "implementation", "edition", "model_size", "num_rows", "dtype", "pass"),
        (*TIMES, "peak_memory_mib", "moved_mb", "gflop", "limit_ms", "limit_share"),
    ),
    "kernel_resources": Table(
        ("kernel", "dtype", "d_head", "capability", *_TILE),
        ("registers", "spilled_bytes", "shared_bytes", "shared_limit_bytes"),
    ),
    "accumulation": Table(("accumulation",), ("steps", "total")),
    "autocast_dtypes": Table(("dtype", "tensor"), ("observed_dtype",)),
    "checkpointing_times": Table(
        (*MODEL, "strategy", "pass", "warmup_steps"),
        (*TIMES, "peak_memory_mib", "requested_memory_mib", "saved_for_backward_mib", "recomputed_blocks"),
    ),
    "memory_peaks": Table(
        (*_STEP, "stage", "category"),
        ("size_mib", "at_ms", "peak_memory_mib", "requested_memory_mib"), group=_STEP,
    ),
    "memory_timeline": Table((*_STEP, "point", "category"), ("stage", "at_ms", "size_mib"), group=_STEP),
    "largest_allocations": Table(
        (*_STEP, "rank_by_size"), ("size_mib", "category", "range", "code", "count"), group=_STEP
    ),
    "block_tensors": Table((*MODEL, "kind", "module", "tensor", "code"), ("count", "size_mib"), group=MODEL),
    "kernels": Table((*_PROFILE, "range", "kernel", "class"), ("calls", "total_ms"), group=_PROFILE),
    "ranges": Table(
        (*_PROFILE, "range"),
        ("host_ms", "device_span_ms", "device_busy_ms", "device_idle_share", "calls"), group=_PROFILE,
    ),
    "nsys_timeline": Table(
        (*_PROFILE, "lane", "span"), ("event", "depth", "start_ms", "end_ms"), group=_PROFILE
    ),
    "collective_times": Table(
        ("collective", "message_mb", "dtype", *_GROUP, "warmup_steps"),
        (*TIMES, "algorithm_bandwidth_gbps", "bus_bandwidth_gbps"),
    ),
    "ddp_times": Table(
        (*MODEL, *_GROUP, "bucket_size_mb", "pass", "warmup_steps"),
        (*TIMES, "peak_memory_mib", "communication_ms", "no_comm_ms", "exposed_communication_ms"),
    ),
    "hidden_messages": Table(
        (*MODEL, *_GROUP, "bucket_size_mb", "pass", "warmup_steps"),
        (*TIMES, "no_comm_ms", "calls", "issue_ms"),
    ),
    "ddp_overlap": Table(_RANK, _OVERLAP),
    "ddp_timeline": Table((*_RANK, "lane", "span"), ("range", "start_ms", "end_ms"), group=_RANK),
    "sharding_times": Table(
        (*MODEL, *_GROUP, "pass", "warmup_steps"),
        (*TIMES, "peak_memory_mib", "requested_memory_mib", "no_comm_ms", "exposed_communication_ms"),
    ),
    "sharding_memory": Table(
        (*MODEL, *_GROUP, "moment", "category"), ("size_mib", "predicted_mib"), group=(*MODEL, *_GROUP)
    ),
    "sharding_memory_timeline": Table(
        (*MODEL, *_GROUP, "point", "category"), ("stage", "at_ms", "size_mib"), group=(*MODEL, *_GROUP)
    ),
    "sharding_messages": Table(
        (*MODEL, *_GROUP, "collective"), ("calls", "sent_mb", "predicted_sent_mb"), group=(*MODEL, *_GROUP)
    ),
    "gathers": Table(
        (*MODEL, *_GROUP, "pass", "unit"), ("calls", "sent_mb", "start_ms", "end_ms", "needed_ms"),
        group=(*MODEL, *_GROUP),
    ),
    "full_step_times": Table(
        (*_FULL_STEP, "pass", "warmup_steps"), (*TIMES, "peak_memory_mib", "requested_memory_mib")
    ),
    "full_step_kept": Table((*_FULL_STEP, "tensor"), ("count", "size_mib", "recompute_ms"), group=_FULL_STEP),
    "full_step_kernels": Table(
        (*_FULL_STEP, "range", "kernel", "class"), ("calls", "total_ms"), group=_FULL_STEP
    ),
    "full_step_timeline": Table(
        (*_FULL_STEP, "lane", "span"), ("range", "start_ms", "end_ms"), group=_FULL_STEP
    ),
    "full_step_losses": Table((*_FULL_STEP, "step_index"), ("loss", "gradient_norm"), group=_FULL_STEP),
    "training_drift": Table(
        (*MODEL, *_GROUP, "bucket_size_mb", "optimizer", "compared", "step_index"), ("max_difference",)
    ),
}
# fmt: on

# Every column that says, in some table, what was measured.
KEYS = tuple(name for name in COLUMNS if any(name in table.keys for table in TABLES.values()))
