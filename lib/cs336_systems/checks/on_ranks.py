"""A class of the reader's tried by several processes: what the checkers of parallel training share."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle  # takes classes of a notebook by value
import torch.distributed as dist

from cs336_systems.parallel import WorkerContext, WorkerError, stream

# What is wrong on this rank, or None. All ranks run all of a case: who leaves early lets the others wait.
Case = Callable[[WorkerContext, Any], str | None]
_WATCHED = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single")
_WATCHED += ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")


def check_on_ranks(
    name: str, candidate: Any, cases: Sequence[Case], ending: str, world_size: int, timeout_s: float
) -> None:
    """Run the cases in `world_size` CPU processes, up to the first that fails on any rank.

    A case that is a function with a docstring prints it when it has passed.

    Args:
        name: of the candidate, for messages.
        candidate: what the cases try; it may be defined in a notebook.
        cases: functions of importable modules, or partials of them.
        ending: the call after which no message may be under way, such as "step()".

    Raises:
        AssertionError: what is wrong, where, and how to mend it.
    """
    pickled = cloudpickle.dumps(candidate)
    how = {"backend": "gloo", "timeout_s": timeout_s}
    passed = stream(run_cases, world_size, pickled, cases, ending, **how)
    try:
        while True:
            print(f"✓ {next(passed)}")
    except StopIteration as end:
        failures = end.value[0]
    except WorkerError as error:
        raise AssertionError(f"{name} did not get through: {error}") from error
    if failures:
        raise AssertionError("\n".join(f"{name}, {failure}" for failure in failures))
    print(f"{name}: {len(cases)} cases right on {world_size} ranks")


def run_cases(context: WorkerContext, candidate: bytes, cases: Sequence[Case], ending: str) -> list[str]:
    """The worker of `check_on_ranks`: what is wrong in the first case that fails on any rank, or nothing."""
    with _watched_messages() as works:  # before the class is loaded, whichever way it imports the functions
        loaded = cloudpickle.loads(candidate)
        for case in cases:
            works.clear()
            sentence = case(context, loaded)
            sentences: list[str | None] = [None] * context.world_size
            # What is still under way may or may not have arrived, so it is the better explanation.
            dist.all_gather_object(sentences, _unfinished(works, ending) or sentence)
            if any(sentences):
                seen_by = {
                    sentence: [str(rank) for rank, other in enumerate(sentences) if other == sentence]
                    for sentence in filter(None, sentences)
                }
                return [f"rank {', '.join(ranks)}: {sentence}" for sentence, ranks in seen_by.items()]
            if inspect.isfunction(case) and case.__doc__:
                context.send(case.__doc__)
    return []


def _unfinished(works: "list[_WatchedWork]", ending: str) -> str | None:
    unfinished = [work for work in works if not work.waited_for]
    if not unfinished:
        return None
    name = unfinished[0].name
    return (
        f"{ending} left {len(unfinished)} of {len(works)} {name.replace('_', '-')}s possibly under way. Keep "
        f"every handle that {name}(..., async_op=True) returns, and wait() for it."
    )


class _WatchedWork:
    """A handle that remembers whether anybody asked it to finish."""

    def __init__(self, name: str, work: dist.Work):
        self.name, self._work, self.waited_for = name, work, False

    def __getattr__(self, name: str) -> Any:
        self.waited_for = True
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        self.waited_for = True
        work, self._work = self._work, _Done()  # which does not keep the tensors alive
        return work.wait(*args)


class _Done:
    """The handle of a message that has been waited for."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


# Of one message: the function's name, its arguments, and the handle that it returned, if it did.
Observer = Callable[[str, tuple, dict, "_WatchedWork | None"], None]
_observers: list[Observer] = []


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """In a case: the observer is told each message that the candidate has started."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextlib.contextmanager
def _watched_messages() -> Iterator[list[_WatchedWork]]:
    """Record the asynchronous messages started inside."""
    works: list[_WatchedWork] = []
    calls: list[str] = []  # under way: an old name of a function calls the new one

    def watched(name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> _WatchedWork | None:
            calls.append(name)
            try:
                work = original(*args, **kwargs)
            finally:
                calls.pop()
            if work is not None and not isinstance(work, _WatchedWork):
                work = _WatchedWork(name, work)
                works.append(work)
            for observer in [] if calls else _observers:
                observer(name, args, kwargs, work)
            return work

        return call

    originals = {name: getattr(dist, name) for name in _WATCHED if hasattr(dist, name)}
    homes = (dist, dist.distributed_c10d)  # the name everybody uses, and the one under which it is pickled
    for home in homes:
        for name, original in originals.items():
            setattr(home, name, watched(name, original))
    try:
        yield works
    finally:
        for home in homes:
            for name, original in originals.items():
                setattr(home, name, original)
