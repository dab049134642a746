"""The one harness of every benchmark: a grid of cases, a set-up that makes steps of them, a row for each.

    def setup(case):                        # called once for all passes of a case
        x = torch.randn(case.num_rows, device=case.device)
        return {"forward": Step(lambda: x.sum())}

    for rows in measure(grid(num_rows=[256, 1024], pass_=["forward"]), setup):
        page.save(rows, "sum_times")

A case that runs out of memory is a row with the status "oom", and every later case still runs: in one
process its memory is given back, over several ranks the processes are started again for the rest.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product
from typing import NamedTuple

import torch
from torch import Tensor

from labbook import ranks, timing
from labbook.timing import MIB, Timing

TIMEOUT_S = 3600  # of one start of processes
_ALSO = {"warmup_steps": 1, "steps": 5}  # of the steps beside the one that a row is about


class Case(dict):
    """One point of a grid: the key columns of a row, also as attributes (`case.pass_` for the column "pass").

    `case.device` is where it runs; it is no column.
    """

    device: torch.device

    def __getattr__(self, name):
        try:
            return self[name.removesuffix("_")]
        except KeyError:
            raise AttributeError(f"the case has no {name!r}") from None


@dataclass(frozen=True)
class Step:
    """What is timed.

    run: one step; it is passed what `prepare` returned, or nothing where there is no `prepare`.
    prepare: run before each step, outside the measured time.
    compiled: something in it goes through torch.compile: it starts from empty caches and has `compile_s`.
    cold: the L2 cache is flushed before each repetition, and gradients of the tensors in `clear` are dropped;
        `prepare`, `compiled` and the numbers of steps are not used then. Over ranks it is not, nor `clear`.
    also: more steps, each by the value column that its median becomes: `{"no_comm_ms": step}`. They are timed
        after `run`, in that order, five times after one warm-up, if not `cold`; over ranks the slowest counts
        for them too. A function stands for a step that only runs it; one that ran out of memory leaves its
        column empty.
    values: called after the timing for more columns of the row; "tables" are rows of other tables, by name.
    together: over ranks, more arguments of `ranks.time_together`: calls, limit_s.
    least_bytes: that the set-up itself keeps allocated. A peak below it is an error and no row.
    """

    run: Callable
    prepare: Callable | None = None
    compiled: bool = False
    cold: bool = False
    clear: Sequence[Tensor] = ()
    also: Mapping = field(default_factory=dict)
    values: Callable | None = None
    together: Mapping = field(default_factory=dict)
    least_bytes: int = 0

    def timed(self, device: torch.device, context=None, *, warmup_steps: int, steps: int) -> Timing:
        """Its times in this process, or on every rank, each of which has a context.

        | | clock | ignores |
        |:--|:--|:--|
        | context | ranks.time_together | cold, clear, compiled |
        | cold | timing.time_cold_cache | prepare, compiled, together, both counts |
        | compiled | timing.time_compiled | clear, together |
        | else | timing.time_steps | clear, together |
        """
        counts = {"warmup_steps": warmup_steps, "steps": steps}
        if context is not None:
            return ranks.time_together(
                self.run, context, prepare=self.prepare, **counts, **self.together
            )
        if self.cold:
            return timing.time_cold_cache(self.run, device=device, to_clear=self.clear)
        timer = timing.time_compiled if self.compiled else timing.time_steps
        return timer(self.run, prepare=self.prepare, device=device, **counts)

    def medians(self, device: torch.device, context=None) -> dict[str, float]:
        """The value columns of the steps beside it."""
        columns = {}
        for name, other in self.also.items():
            step = other if isinstance(other, Step) else Step(other)
            times = step.timed(device, context, **_ALSO)
            if times.status == "ok":
                columns[name] = times.p50_ms
        return columns


Setup = Callable  # of a case, and over ranks of its context: the step of each pass


def grid(**columns) -> list[Case]:
    """Every combination of the columns' values, the last varying fastest; what is no list is fixed."""
    values = [value if isinstance(value, list | tuple) else [value] for value in columns.values()]
    names = [name.removesuffix("_") for name in columns]
    return [Case(zip(names, point, strict=True)) for point in product(*values)]


def measure(
    cases: Iterable[Case],
    setup: Setup,
    *,
    around: Callable = nullcontext,
    skip: Callable | None = None,
    errors: type | tuple = (),
    stream: Callable | None = None,
    device: str | torch.device = "auto",
    warmup_steps: int = 5,
    steps: int = 10,
) -> Iterator[list[dict]]:
    """Time each case; yields the rows of the cases that share a set-up.

    These stand one after the other and differ in `pass` alone: let it vary fastest. Over ranks, neighbours
    that agree in `world_size` and `backend` share a start of the processes.

    setup: called with the first of such cases, returns the step of each `pass` ("" without that column);
        it and the steps run with the matmul precision of the case's `dtype`.
    around: makes the context that a set-up and its steps run in: an attention backend switched on, say.
    skip: why a case cannot be measured, or ""; its row has the status "skipped" and that reason.
    errors: exceptions of a set-up or step that are a row with the status "error" and its message; over
        ranks none is, and they propagate.
    stream: starts worker processes: stream(worker, world_size, *args, backend=..., timeout_s=...), which
        yields what rank 0 sends. Each case then has the columns `world_size` and `backend`, `setup` is
        called as setup(case, context) on each rank, and of every step the slowest rank counts.
    device: where the cases run; over ranks each has its own.
    warmup_steps, steps: as in `timing.time_steps`; a case's columns of these names go before.
    Raises whatever a set-up or step raises that is neither out of memory nor one of `errors`.
    """
    sweep = _Sweep(setup, around, errors, {"warmup_steps": warmup_steps, "steps": steps})
    device = None if stream else timing.resolve_device(device)
    for_ranks = []
    for _, same_setup in groupby(cases, key=lambda case: case | {"pass": None}):
        group = []
        for case in same_setup:
            case.device = device
            reason = skip(case) if skip else ""
            if reason:
                yield [_row(case, Timing(status="skipped", reason=reason))]
            else:
                group.append(case)
        if group and stream:
            for_ranks.append(group)
        elif group:
            yield _measured(group, sweep, _timed_in_process)
    # Of neighbours alone, as above.
    by_start = groupby(for_ranks, key=lambda group: (group[0]["world_size"], group[0]["backend"]))
    for (world_size, backend), groups in by_start:
        start = partial(stream, _on_rank, world_size, backend=backend, timeout_s=TIMEOUT_S)
        yield from _over_ranks(groups, sweep, start)


class _Sweep(NamedTuple):
    """What all cases have in common, as `measure` describes it. counts: of steps, by their columns."""

    setup: Setup
    around: Callable
    errors: type | tuple
    counts: Mapping


def _measured(group, sweep, timed):
    """Rows of the cases of one set-up. timed: one of the two functions below."""
    first = group[0]
    with timing.matmul_precision(first.get("dtype", "float32")), sweep.around(first):
        rows = timed(group, sweep)
    # Now that the steps are gone, and with them what they hold.
    timing.release_memory(first.device)
    return rows


def _timed_on_rank(group, sweep, context):
    """Running out of memory ends the process: the other ranks cannot go on without it."""
    step_of = sweep.setup(group[0], context)
    return [_timed(case, step_of, sweep.counts, context) for case in group]


def _timed_in_process(group, sweep):
    """What runs out of memory is a row."""
    first = group[0]
    step_of, failure = _attempt(partial(sweep.setup, first), first.device, sweep.errors)
    if failure:
        return [_row(case, failure) for case in group]
    rows = []
    for case in group:
        timed = partial(_timed, case, step_of, sweep.counts)
        row, failure = _attempt(timed, case.device, sweep.errors)
        rows.append(_row(case, failure) if failure else row)
    return rows


def _attempt(function, device, errors):
    """What a function returns, or else what stands for its times in a row."""
    try:
        result, reason = timing.run_or_out_of_memory(function, device)
    except errors as error:
        if isinstance(error, NotImplementedError) and not error.args:
            raise  # a learner's stub: what is not written yet has no result
        return None, Timing(status="error", reason=timing.one_line(error))
    failure = Timing(status="oom", reason=reason) if reason else None
    return result, failure


def _timed(case, step_of, counts, context=None):
    """The row of a case. step_of: what its set-up returned; counts: of steps, by their columns."""
    step = step_of[case.get("pass", "")]
    counts = {name: case.get(name, count) for name, count in counts.items()}
    if context is not None:
        ranks.reset_peaks(context)
    times = step.timed(case.device, context, **counts)
    if times.status != "ok":
        return _row(case, times)
    # Before the steps beside it, whose memory does not count.
    if context is not None:
        times = replace(times, **ranks.peaks(context))
    _refuse_impossible_peak(case, times.peak_memory_mib, step.least_bytes)
    values = step.medians(case.device, context)
    if step.values:
        values |= step.values()
    return _row(case, times, **values)


def _refuse_impossible_peak(case, peak_mib, least_bytes):
    if peak_mib is not None and peak_mib * MIB < least_bytes:
        raise ValueError(
            f"{dict(case)}: its peak is {peak_mib:.1f} MiB, and the set-up alone keeps "
            f"{least_bytes / MIB:.1f} MiB"
        )


def _over_ranks(groups, sweep, start):
    """Start the processes, and again for what is left whenever a rank ran out of memory."""
    waiting = list(groups)
    while waiting:
        try:
            for rows in start(list(waiting), sweep):
                waiting.pop(0)
                yield rows
            return
        except RuntimeError as error:
            cause = str(getattr(error, "cause", error))
            if not (waiting and timing.is_out_of_memory(cause)):
                raise
        # What rank 0 had not sent when a rank ended.
        yield [_row(case, Timing(status="oom", reason=cause[:200])) for case in waiting.pop(0)]


def _on_rank(context, groups, sweep):
    """What each rank does with the cases, all in the same order; rank 0 sends the rows of each group."""
    for group in groups:
        for case in group:
            case.device = context.device
        context.send(_measured(group, sweep, partial(_timed_on_rank, context=context)))


def _row(case, times, **values):
    """The key columns, times and other values of a case, without what it does not have."""
    columns = case | times.as_row() | values
    return {name: value for name, value in columns.items() if value is not None}
