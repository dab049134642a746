"""Training steps of each sharding strategy, PyTorch's own among them, in one run: time, memory, messages."""

import gc
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.accounting import sharding_costs
from cs336_systems.bench.ddp_bench import check_run
from cs336_systems.bench.model_bench import OF_ANY_TIMING, model_key
from cs336_systems.configs import model_size as find_size
from cs336_systems.measure import allocations
from cs336_systems.measure.allocations import MemoryHistory
from cs336_systems.measure.collective_calls import Message, watch_collectives
from cs336_systems.measure.memory_recording import record_memory
from cs336_systems.measure.saved_tensors import storage_bytes
from cs336_systems.parallel import WorkerContext, choose_backend, stream
from cs336_systems.parallel.steps import ShardedSteps
from cs336_systems.parallel.strategies import SHARDINGS
from labbook.ranks import (
    measure_on_all,
    one_step_ms,
    peaks,
    reset_peaks,
    slowest,
)
from labbook.timing import MIB, Timing, synchronize

Row = dict[str, Any]

SHARDING_SLUG = "optimizer_state_sharding_accounting"  # under which all tables are kept
STEPS_WITHOUT = 2  # steps timed without communication
TIMEOUT_S = 3600.0


def benchmark_sharding(
    world_size: int,
    *,
    steps: int = 10,
    rounds: int = 2,
    measured: Collection[tuple[str, str]] = (),
    **what: Any,
) -> Iterator[tuple[str, list[Row]]]:
    """Train with each of SHARDINGS in turn, in one launch; PyTorch's fused AdamW updates in all.

        for table, rows in benchmark_sharding(2):
            page.save(rows, table, slug=SHARDING_SLUG)

    Yields pairs of a table's name and its rows, as they come; all of one model, dtype and strategy:

    - "sharding_memory", of the rank whose peak is highest: what it holds once all is built, before and after
      the optimizer in the first step, and at the peak of the second; measured and by the closed form.
    - "sharding_memory_timeline", of the second step on that rank.
    - "sharding_messages": what is sent in the second step, measured and by the closed form.
    - "sharding_times", when its last round is over: of every step the slowest rank counts. `no_comm_ms` is
      the median of two steps whose collectives are left out (`watch_collectives`); the peak is that of
      the timed steps.

    bfloat16 and float16: DDP and optimizers that shard run the forward under autocast, and keep and send
    float32; an FSDP casts weights before it gathers them and gradients before it reduces them, and keeps
    float32 weights, gradients and optimizer state. There the residual stream is of 16 bits too.

    Memory that ran out is a status, and what was to follow is skipped.

    Args:
        steps: timed steps of all rounds together.
        rounds: each strategy is built and timed so often; every other round runs in the reverse order, so
            that a clock that slows down favours nobody.
        measured: pairs (dtype, implementation) to leave out, as of `already_measured`.
        what: as in `sharding_keys`.

    Raises:
        ValueError: as in `sharding_keys`; or rounds is not between 1 and steps.
    """
    keys = sharding_keys(world_size, **what)
    if not 1 <= rounds <= steps:
        raise ValueError(f"rounds is {rounds}; allowed: 1 to {steps}, the number of steps")
    keys = [key for key in keys if (key["dtype"], key["implementation"]) not in measured]
    if keys:
        how = {"backend": keys[0]["backend"], "timeout_s": TIMEOUT_S}
        yield from stream(_measure_all, world_size, keys, steps, rounds, **how)


def already_measured(rows: pd.DataFrame, **run: Any) -> set[tuple[str, str]]:
    """The pairs (dtype, implementation) that rows of sharding_times have, of one run of `benchmark_sharding`.

    Args:
        run: columns of the rows, and the value that they have in the run.
    """
    for name, value in run.items():
        rows = rows[rows[name] == value]
    rows = rows[rows["status"].isin(("ok", "oom"))]
    return set(zip(rows["dtype"], rows["implementation"], strict=True))


def sharding_keys(
    world_size: int,
    *,
    backend: str = "auto",
    model_size: str = "tiny",
    edition: int = 2025,
    context_length: int = 128,
    batch_size: int = 4,
    dtypes: Iterable[str] = ("float32",),
    implementations: Iterable[str] = tuple(SHARDINGS),
    attention_implementation: str = "sdpa",
    warmup_steps: int = 2,
) -> list[Row]:
    """What is run: the keys of all rows, dtype by dtype.

    Args:
        batch_size: sequences in the global batch, shared equally by the ranks.
        implementations: names in SHARDINGS.
        warmup_steps: of each round, before those that are timed.
        backend: as in `launch`.

    Raises:
        ValueError: a name is unknown, or a batch cannot be shared equally.
    """
    config, dtypes, implementations = find_size(model_size, edition), tuple(dtypes), tuple(implementations)
    check_run(world_size, [batch_size], dtypes, implementations, SHARDINGS)
    group = {"world_size": world_size, "backend": choose_backend(backend, world_size)}
    step = (context_length, batch_size, "train_step")
    return [
        model_key(config, *step, dtype, name, warmup_steps, attention_implementation) | group
        for dtype in dtypes
        for name in implementations
    ]


def _measure_all(context: WorkerContext, keys: list[Row], steps: int, rounds: int) -> None:
    """The worker: the rows come out the same on every rank."""
    reason = ""
    for _, group in groupby(keys, key=lambda key: key["dtype"]):
        left, times_ms = list(group), defaultdict(list)
        for number in range(rounds):
            is_last, share = number == rounds - 1, len(range(number, steps, rounds))
            for key in left[:: -1 if number % 2 else 1]:
                times = times_ms[key["implementation"]]
                visit = partial(_visit, context, key, times, share, is_first=number == 0, is_last=is_last)
                values, reason = measure_on_all(visit, context, key["dtype"], reason)
                if is_last or reason:
                    context.send(("sharding_times", [key | values]))
                if reason:
                    left = [other for other in left if other is not key]


def _visit(
    context: WorkerContext, key: Row, times_ms: list[float], steps: int, *, is_first: bool, is_last: bool
) -> Row:
    """One round of one strategy: look at its memory and messages in the first; after the last, its values."""

    def timed(count: int) -> list[float]:
        return slowest([one_step_ms(run.train_step, context, 1) for _ in range(count)], context)

    run = ShardedSteps(key, context)
    if is_first:
        held = _first_step(run)
        with watch_collectives() as messages:
            run.train_step()
        context.send(("sharding_messages", _message_rows(context, key, messages)))
        for table, rows in _memory_rows(context, key, run, held).items():
            context.send((table, rows))
    for _ in range(key["warmup_steps"]):
        one_step_ms(run.train_step, context, 1)
    reset_peaks(context)
    times_ms += timed(steps)
    memory = peaks(context)
    if not is_last:
        return {}
    with watch_collectives(send=False):
        no_comm_ms = statistics.median(timed(STEPS_WITHOUT))
    timing = Timing(step_ms=tuple(times_ms))
    exposed = {"no_comm_ms": no_comm_ms, "exposed_communication_ms": timing.p50_ms - no_comm_ms}
    return timing.as_row() | memory | exposed


def _first_step(run: ShardedSteps) -> dict[str, dict[str, int]]:
    """The first training step, and the bytes that this rank holds at its moments."""
    held = {"initialised": _held(run)}
    run.forward_backward()
    run.communicate()
    held["before step"] = _held(run)
    run.update()
    held["after step"] = _held(run)
    return held


def _held(run: ShardedSteps) -> dict[str, int]:
    """Bytes of each category; the rest is what else the GPU's allocator has given out, or Python can find."""
    owned = {category: storage_bytes(tensors) for category, tensors in run.tensors().items()}
    if run.device.type == "cuda":
        synchronize(run.device)
        total = torch.cuda.memory_stats(run.device)["requested_bytes.all.current"]
    else:
        total = storage_bytes(_tensors_of_python())
    return owned | {"rest": total - sum(owned.values())}


def _tensors_of_python() -> list[Tensor]:
    """All tensors that Python knows and that have memory of their own."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return [tensor for tensor in found if not hasattr(tensor, "_local_tensor") and not tensor.is_meta]


def _memory_rows(
    context: WorkerContext, key: Row, run: ShardedSteps, held: dict[str, dict[str, int]]
) -> dict[str, list[Row]]:
    """Record a step; of the rank that needs most at its peak, its memory at the moments and its timeline."""
    run.model.zero_grad(set_to_none=True)  # what the step begins without is no other's
    others = {
        tensor.untyped_storage().data_ptr(): ("other", tensor.untyped_storage().nbytes())
        for tensor in (_tensors_of_python() if context.device.type == "cpu" else ())
    }
    history = record_memory(run, "train_step", others=others)
    held["peak"] = _at_peak(history)
    points = allocations.timeline_rows(allocations.timeline(history))
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, (held, points))
    fullest, points = max(everyone, key=lambda rank: sum(rank[0]["peak"].values()))
    config, share = find_size(key["model_size"], key["edition"]), key["batch_size"] // context.world_size
    batch = (share, key["context_length"], key["dtype"], context.device.type)
    predicted = sharding_costs.held_bytes(config, key["implementation"], context.world_size, *batch)
    rows = [
        key
        | OF_ANY_TIMING
        | {"moment": moment, "category": category, "size_mib": size / MIB}
        | {"predicted_mib": predicted[moment][category] / MIB}
        for moment, sizes in fullest.items()
        for category, size in sizes.items()
    ]
    return {
        "sharding_memory": rows,
        "sharding_memory_timeline": [key | OF_ANY_TIMING | point for point in points],
    }


def _at_peak(history: MemoryHistory) -> dict[str, int]:
    stages = allocations.stage_peaks(history)
    peak = stages.loc[stages["total"].idxmax()]
    owned = {category: int(peak[category] * MIB) for category in sharding_costs.SHARDED}
    return owned | {"rest": int(peak["total"] * MIB) - sum(owned.values())}


def _message_rows(context: WorkerContext, key: Row, messages: list[Message]) -> list[Row]:
    """A row for each collective; what a rank sends of a message is a mean over the ranks, around a ring."""
    around = (context.world_size - 1) / context.world_size
    config = find_size(key["model_size"], key["edition"])
    predicted = sharding_costs.sent_bytes(config, key["implementation"], context.world_size, key["dtype"])
    calls = Counter(message.collective for message in messages)
    sent = dict.fromkeys([*calls, *predicted], 0.0)
    for message in messages:
        passes = 2 if message.collective == "all_reduce" else 1
        sent[message.collective] += passes * around * message.bytes
    return [
        key
        | OF_ANY_TIMING
        | {"collective": collective, "calls": calls[collective], "sent_mb": size / MIB}
        | {"predicted_sent_mb": predicted.get(collective, 0.0) / MIB}
        for collective, size in sent.items()
    ]
