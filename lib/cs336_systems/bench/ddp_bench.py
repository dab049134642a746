"""Training steps of a Transformer under each data-parallel wrapper, PyTorch's own among them, in one run."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.bench.collectives_bench import time_together
from cs336_systems.bench.model_bench import model_key
from cs336_systems.bench.overlap_bench import profiled
from cs336_systems.configs import ModelConfig
from cs336_systems.configs import model_size as find_size
from cs336_systems.measure.model_steps import ModelSteps
from cs336_systems.measure.rows import save_rows
from cs336_systems.measure.schema import DTYPES
from cs336_systems.measure.timing import (
    MIB,
    matmul_precision,
    release_memory,
    run_or_out_of_memory,
)
from cs336_systems.model import build_model
from cs336_systems.names import check_choice
from cs336_systems.nvtx import annotate
from cs336_systems.parallel.ddp import FlatDDP, NaiveDDP
from cs336_systems.parallel.overlapped import BucketedDDP, OverlappedDDP
from cs336_systems.parallel.worker import WorkerContext

# PyTorch 2.13 renamed this one and warns about the old name.
_settings = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _settings else "broadcast_buffers"

LADDER = "naive_ddp_benchmarking"  # the slug under which all rows are saved, whichever notebook measures


class Single(nn.Module):
    """One process that has nobody to talk to: what the others are compared with."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do."""


class TorchDDP(DistributedDataParallel):
    """PyTorch's own, with our interface: it averages during backward and leaves nothing to finish.

    Like ours it leaves buffers alone between steps.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        super().__init__(
            module, bucket_cap_mb=bucket_size_mb, gradient_as_bucket_view=True, **{_SYNC_BUFFERS: False}
        )

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do."""


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "single": Single,
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "torch": TorchDDP,
}
WITH_BUCKETS = ("bucketed", "torch")


def bucket_variants(
    implementations: Iterable[str], bucket_sizes_mb: Sequence[float]
) -> list[tuple[str, float | None]]:
    """Each wrapper with each bucket size, and once with None if it has no buckets."""
    return [
        (name, size)
        for name in implementations
        for size in (bucket_sizes_mb if name in WITH_BUCKETS else (None,))
    ]


class DataParallelSteps(ModelSteps):
    """The passes of a wrapped model; the range "communication" is the wait for gradients after backward."""

    def __init__(self, wrapped: nn.Module, batch_size: int, context_length: int, dtype: str = "float32"):
        super().__init__(wrapped.module, batch_size, context_length, dtype)
        self.model = wrapped

    def train_step(self) -> None:
        """Forward, backward, the mean of the gradients, and AdamW."""
        self.forward_backward()
        self.communicate()
        self._update()

    def train_alone(self) -> None:
        """The same without communication, to see how much of it a step does not hide."""
        with self.model.no_sync():
            self.forward_backward()
        self._update()

    def communicate(self) -> None:
        """Average whatever has not been averaged; after a pass under no_sync(), that is everything."""
        with annotate("communication"):
            self.model.finish_gradient_synchronization()

    def _update(self) -> None:
        with annotate("optimizer"):
            self.optimizer.step()


def benchmark_ddp(
    context: WorkerContext,
    *,
    model_size: str = "tiny",
    edition: int = 2025,
    context_length: int = 128,
    batch_sizes: Iterable[int] = (4,),
    dtypes: Iterable[str] = ("float32",),
    implementations: Iterable[str] = ("naive", "flat", "overlapped", "bucketed", "torch"),
    bucket_sizes_mb: Iterable[float] = (1, 10, 25, 100, 1000),
    attention_implementation: str = "reference",
    warmup_steps: int = 5,
    steps: int = 10,
    profile: bool = False,
    machine: str | None = None,
) -> list[dict[str, Any]]:
    """A worker for `launch`: time training steps under each wrapper, one row for each and each bucket size.

    Of every step the slowest rank counts. Beside the times of the whole step, a row has medians of:
    `alone_ms`, a step without communication; `exposed_communication_ms`, by how much the step is longer
    than that; `communication_ms`, all communication with nothing to hide behind ("torch" cannot be asked for
    it). The first and the last are of half as many steps. "single" has none of the three.

    Args:
        batch_sizes: sequences in the global batch, shared equally by the ranks.
        implementations: names in WRAPPERS; "bucketed" and "torch" run with every bucket size, "single" in a
            world of one.
        profile: afterwards, look at the kernels of a step too (columns of `lanes.profiled`), which takes
            seconds a row; of "torch" only with the first bucket size.
        machine: save each row as it comes, as one of this machine's (`LADDER`), and print it.

    Returns:
        The rows, the same on every rank. Memory that ran out is a status, and what was to follow is skipped:
        after that the ranks need not agree on what they have sent.

    Raises:
        ValueError: a name is unknown, a batch cannot be shared equally, or "single" is not alone.
    """
    config = find_size(model_size, edition)
    dtypes, batch_sizes, implementations = tuple(dtypes), tuple(batch_sizes), tuple(implementations)
    bucket_sizes_mb = tuple(bucket_sizes_mb)
    _check(context, dtypes, batch_sizes, implementations)
    variants = bucket_variants(implementations, bucket_sizes_mb)
    keys = []
    for dtype, batch_size, (name, bucket_size_mb) in itertools.product(dtypes, batch_sizes, variants):
        key = model_key(
            config,
            context_length,
            batch_size,
            "train_step",
            dtype,
            name,
            warmup_steps,
            attention_implementation,
        )
        world = {"world_size": context.world_size, "backend": context.backend}
        keys.append(key | world | {"bucket_size_mb": bucket_size_mb})
    rows: list[dict[str, Any]] = []
    for key in keys:
        if any(row["status"] == "oom" for row in rows):
            values = {"status": "skipped", "reason": "memory ran out in the same process group"}
        else:
            values = _measure(context, key["dtype"], partial(_time, context, config, key, steps))
        rows.append(key | values)
        _save(context, rows[-1], machine)
        if machine and context.rank == 0:
            print(_sentence(rows[-1]))
    # After a profile every launch of its process takes longer for good, so all profiles come last.
    for key, row in zip(keys, rows, strict=True) if profile and rows[-1]["status"] == "ok" else ():
        first = key["bucket_size_mb"] in (None, bucket_sizes_mb[0])
        if key["implementation"] == "single" or (key["implementation"] == "torch" and not first):
            continue
        look = partial(_profile, context, config, key, machine, keep_timeline=first)
        seen = _measure(context, key["dtype"], look)
        if "status" in seen:  # memory ran out
            break
        row |= seen
        _save(context, row, machine)
    return rows


def _check(
    context: WorkerContext, dtypes: tuple[str, ...], batch_sizes: tuple[int, ...], names: tuple[str, ...]
) -> None:
    for dtype in dtypes:
        check_choice("dtype", dtype, DTYPES)
    for name in names:
        check_choice("implementation", name, WRAPPERS)
    if "single" in names and context.world_size > 1:
        raise ValueError(f"'single' is one process; this is one of {context.world_size}; allowed: the others")
    for batch_size in batch_sizes:
        if batch_size % context.world_size:
            raise ValueError(
                f"batch_size {batch_size} cannot be shared by {context.world_size} ranks; "
                "allowed: its multiples"
            )


def _sentence(row: dict[str, Any]) -> str:
    buckets = "" if row["bucket_size_mb"] is None else f" with buckets of {row['bucket_size_mb']:g} MB"
    what = f"{row['implementation']}{buckets}, {row['dtype']}, batch {row['batch_size']}"
    if row["status"] != "ok":
        return f"{what}: {row['status']} ({row['reason']})"
    alone = f", {row['alone_ms']:.4g} ms without communication" if "alone_ms" in row else ""
    return f"{what}: {row['p50_ms']:.4g} ms a step{alone}"


def _save(context: WorkerContext, row: dict[str, Any], machine: str | None) -> None:
    if machine and context.rank == 0:
        save_rows([row], LADDER, machine=machine)


def _measure(context: WorkerContext, dtype: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The value columns that `measure` returns; out of memory on any rank is the status on all."""
    with matmul_precision(dtype):
        values, reason = run_or_out_of_memory(measure, context.device)
    release_memory(context.device)  # a wrapper and its hooks refer to each other
    reasons: list[str] = [""] * context.world_size
    dist.all_gather_object(reasons, reason)
    if any(reasons):
        return {"status": "oom", "reason": next(filter(None, reasons))}
    return values


def _build(context: WorkerContext, config: ModelConfig, key: dict[str, Any]) -> DataParallelSteps:
    model = build_model(
        config,
        key["context_length"],
        attention_implementation=key["attention"],
        device=context.device,
    )
    buckets = {} if key["bucket_size_mb"] is None else {"bucket_size_mb": key["bucket_size_mb"]}
    wrapped = WRAPPERS[key["implementation"]](model, **buckets)
    share = key["batch_size"] // context.world_size
    return DataParallelSteps(wrapped, share, key["context_length"], key["dtype"])


def _time(context: WorkerContext, config: ModelConfig, key: dict[str, Any], steps: int) -> dict[str, Any]:
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    run = _build(context, config, key)
    together = time_together(run.train_step, context, warmup_steps=key["warmup_steps"], steps=steps)
    peak = torch.cuda.max_memory_allocated(context.device) / MIB if on_gpu else None
    values = together.as_row() | {"peak_memory_mib": peak}
    if key["implementation"] == "single":
        return values
    fewer = {"warmup_steps": 1, "steps": -(-steps // 2)}
    alone = time_together(run.train_alone, context, **fewer)
    values |= {"alone_ms": alone.p50_ms, "exposed_communication_ms": together.p50_ms - alone.p50_ms}
    if key["implementation"] != "torch":
        values["communication_ms"] = time_together(run.communicate, context, **fewer).p50_ms
    return values


def _profile(
    context: WorkerContext,
    config: ModelConfig,
    key: dict[str, Any],
    machine: str | None,
    *,
    keep_timeline: bool,
) -> dict[str, Any]:
    """What the kernels of a warm step tell; buckets have found their order by then."""
    run = _build(context, config, key)
    for _ in range(2):
        run.train_step()
    return profiled(run.train_step, context, key, machine, keep_timeline=keep_timeline)
