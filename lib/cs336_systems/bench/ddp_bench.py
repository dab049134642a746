"""Training steps of a Transformer under each data-parallel wrapper, PyTorch's own among them, in one run."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from cs336_systems.arguments import check_choice
from cs336_systems.bench.model_bench import model_key
from cs336_systems.bench.overlap_bench import profile_overlap
from cs336_systems.configs import model_size as find_size
from cs336_systems.dtypes import DTYPES
from cs336_systems.parallel import WorkerContext, choose_backend, stream
from cs336_systems.parallel.steps import steps_of
from cs336_systems.parallel.strategies import WITH_BUCKETS, WRAPPERS
from labbook.ranks import measure_on_all, peaks, reset_peaks, time_together

Row = dict[str, Any]

DDP_SLUGS = {
    "ddp_times": "naive_ddp_benchmarking",
    "ddp_overlap": "ddp_overlap_individual_parameters_benchmarking",
    "ddp_timeline": "ddp_overlap_individual_parameters_benchmarking",
}


def benchmark_ddp(
    world_size: int,
    *,
    backend: str = "auto",
    model_size: str = "tiny",
    edition: int = 2025,
    context_length: int = 128,
    batch_sizes: Iterable[int] = (4,),
    dtypes: Iterable[str] = ("float32",),
    implementations: Iterable[str] = ("naive", "flat", "overlapped", "bucketed", "torch"),
    bucket_sizes_mb: Iterable[float] = (1, 10, 25, 100, 1000),
    attention_implementation: str = "plain",
    warmup_steps: int = 5,
    steps: int = 10,
    profile: bool = False,
) -> Iterator[tuple[str, list[Row]]]:
    """Time training steps in `world_size` processes, a row for each wrapper and bucket size.

    Yields pairs of a table's name and its rows, as they come: "ddp_times", and with `profile` afterwards
    "ddp_overlap", a row for each rank, and "ddp_timeline" of rank 0. Of every step the slowest rank counts.

    Raises:
        ValueError: a name is unknown, a batch cannot be shared equally, or "single" is not alone.
    """
    config = find_size(model_size, edition)
    dtypes, batch_sizes, implementations = tuple(dtypes), tuple(batch_sizes), tuple(implementations)
    check_run(world_size, batch_sizes, dtypes, implementations, WRAPPERS)
    if "single" in implementations and world_size > 1:
        raise ValueError(f"'single' is one process; this is one of {world_size}; allowed: the others")
    variants = bucket_variants(implementations, tuple(bucket_sizes_mb))
    group = {"world_size": world_size, "backend": choose_backend(backend, world_size)}
    keys = []
    for dtype, batch_size, (name, size) in itertools.product(dtypes, batch_sizes, variants):
        what = (context_length, batch_size, "train_step", dtype, name, warmup_steps, attention_implementation)
        keys.append(model_key(config, *what) | group | {"bucket_size_mb": size})
    how = {"backend": group["backend"], "timeout_s": 3600.0}
    yield from stream(_measure_all, world_size, keys, steps, profile, **how)


def bucket_variants(
    implementations: Iterable[str], bucket_sizes_mb: Sequence[float]
) -> list[tuple[str, float | None]]:
    """Each wrapper with each bucket size, and once with None if it has no buckets."""
    return [
        (name, size)
        for name in implementations
        for size in (bucket_sizes_mb if name in WITH_BUCKETS else [None])
    ]


def check_run(
    world_size: int,
    batch_sizes: Iterable[int],
    dtypes: Iterable[str],
    implementations: Iterable[str],
    known: Iterable[str],
) -> None:
    """Refuse (ValueError) unknown names, and a batch that the ranks cannot share equally."""
    for name in implementations:
        check_choice("implementation", name, known)
    for dtype in dtypes:
        check_choice("dtype", dtype, DTYPES)
    for size in batch_sizes:
        if size % world_size:
            sentence = f"batch_size {size} cannot be shared by {world_size} ranks equally"
            raise ValueError(f"{sentence}; allowed: its multiples")


def wrap(module: nn.Module, implementation: str, bucket_size_mb: float | None) -> nn.Module:
    """The module in the wrapper of this name."""
    options = {} if bucket_size_mb is None else {"bucket_size_mb": bucket_size_mb}
    return WRAPPERS[implementation](module, **options)


def _measure_all(context: WorkerContext, keys: list[Row], steps: int, profile: bool) -> None:
    reason = ""
    for key in keys:
        values, reason = measure_on_all(partial(_time, context, key, steps), context, key["dtype"], reason)
        context.send(("ddp_times", [key | values]))
    first_size = next((key["bucket_size_mb"] for key in keys if key["bucket_size_mb"] is not None), None)
    # After a profile every launch of its process takes longer for good, so all profiles come last.
    for key in keys if profile and not reason else ():
        is_first = key["bucket_size_mb"] in (None, first_size)
        if key["implementation"] == "single" or (key["implementation"] == "torch" and not is_first):
            continue
        look = partial(_profile, context, key, with_timeline=is_first)
        seen, reason = measure_on_all(look, context, key["dtype"])
        if reason:
            break
        for table, rows in seen.items():
            if rows:
                context.send((table, rows))


def _time(context: WorkerContext, key: Row, steps: int) -> Row:
    reset_peaks(context)
    run = steps_of(key, context)
    whole = time_together(run.train_step, context, warmup_steps=key["warmup_steps"], steps=steps)
    values = whole.as_row() | {"peak_memory_mib": peaks(context).get("peak_memory_mib")}
    if key["implementation"] == "single":
        return values
    fewer = {"warmup_steps": 1, "steps": -(-steps // 2)}
    without = time_together(run.train_without_communication, context, **fewer)
    values |= {"no_comm_ms": without.p50_ms, "exposed_communication_ms": whole.p50_ms - without.p50_ms}
    if key["implementation"] != "torch":
        values["communication_ms"] = time_together(run.communicate, context, **fewer).p50_ms
    return values


def _profile(context: WorkerContext, key: Row, *, with_timeline: bool) -> Row:
    run = steps_of(key, context)
    for _ in range(2):  # buckets have found their order by then
        run.train_step()
    return profile_overlap(run.train_step, context, key, with_timeline=with_timeline)
