"""A class of the reader's tried by several processes: what the checkers of parallel training share."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cloudpickle  # takes classes of a notebook by value
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.parallel import WorkerContext, WorkerError, stream

# What is wrong on this rank, or None. All ranks run all of a case: who leaves early lets the others wait.
Case = Callable[[WorkerContext, Any], str | None]
_WATCHED = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single")
_WATCHED += ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")


def check_on_ranks(
    candidate: Callable[..., Any],
    arguments: dict[str, Any],
    cases: Sequence[Case],
    world_size: int = 2,
    timeout_s: float = 60.0,
) -> None:
    """Run the cases in `world_size` CPU processes, up to the first that fails on any rank.

    A case that is a function with a docstring prints it when it has passed.

    Args:
        candidate: what the cases try, given these arguments; it may be defined in a notebook.
        cases: functions of importable modules, or partials of them.

    Raises:
        AssertionError: what is wrong, where, and how to mend it.
    """
    name = getattr(candidate, "__name__", repr(candidate))
    pickled = cloudpickle.dumps(partial(candidate, **arguments))
    passed = stream(run_cases, world_size, pickled, cases, backend="gloo", timeout_s=timeout_s)
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


def run_cases(context: WorkerContext, candidate: bytes, cases: Sequence[Case]) -> list[str]:
    """The worker of `check_on_ranks`: what is wrong in the first case that fails on any rank, or nothing."""
    with _watched_messages():  # before the class is loaded, whichever way it imports the functions
        loaded = cloudpickle.loads(candidate)
        for case in cases:
            sentences = from_all(_mistake(context, loaded, case))
            if any(sentences):
                seen_by = {
                    sentence: [str(rank) for rank, other in enumerate(sentences) if other == sentence]
                    for sentence in filter(None, sentences)
                }
                return [f"rank {', '.join(ranks)}: {sentence}" for sentence, ranks in seen_by.items()]
            if inspect.isfunction(case) and case.__doc__:
                context.send(case.__doc__)
    return []


def _mistake(context: WorkerContext, candidate: Any, case: Case) -> str | None:
    works: list[Work] = []
    with observed(lambda message: works.extend(filter(None, [message.work]))):
        sentence = case(context, candidate)
    # What is still under way may or may not have arrived, so it is the better explanation.
    return _unfinished(works) or sentence


def from_all(own: Any) -> list[Any]:
    """What every rank has, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def unlike(found: Tensor, wanted: Tensor, suspects: dict[str, Tensor], otherwise: str) -> str | None:
    """None where a tensor is the wanted one; else the sentence of what it is instead, of the suspects."""
    if close(found, wanted):
        return None
    return next((sentence for sentence, other in suspects.items() if close(found, other)), otherwise)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)


class Work:
    """The handle of an asynchronous message, which remembers whether anybody asked it to finish."""

    _DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)

    def __init__(self, name: str, work: dist.Work):
        self.name, self._work, self.waited_for = name, work, False

    def __getattr__(self, name: str) -> Any:
        self.waited_for = True
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        self.waited_for = True
        work, self._work = self._work, self._DONE  # which does not keep the tensors alive
        return work.wait(*args)


def _unfinished(works: Sequence[Work]) -> str | None:
    names = [work.name for work in works if not work.waited_for]
    if not names:
        return None
    return (
        f"{len(names)} of {len(works)} {names[0].replace('_', '-')}s may still be under way at the end. Keep "
        f"every handle that {names[0]}(..., async_op=True) returns, and wait() for it."
    )


@dataclass(frozen=True)
class Message:
    """A message that the candidate has started: the function's name, and the handle that it returned, if any.

    buffer: the largest of the message; of a list of tensors, an empty one that stands for all together.
    """

    name: str
    buffer: Tensor
    work: Work | None


_observers: list[Callable[[Message], None]] = []


@contextlib.contextmanager
def observed(observer: Callable[[Message], None]) -> Iterator[None]:
    """In a case: the observer is told each message that the candidate has started."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextlib.contextmanager
def _watched_messages() -> Iterator[None]:
    under_way: list[str] = []  # an old name of a function calls the new one, which is no message of its own

    def watched(name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            under_way.append(name)
            try:
                work = original(*args, **kwargs)
            finally:
                under_way.pop()
            if under_way:
                return work
            work = None if work is None else Work(name, work)
            for observer in _observers:
                observer(Message(name, _largest([*args, *kwargs.values()]), work))
            return work

        return call

    replaced = {name: watched(name, getattr(dist, name)) for name in _WATCHED if hasattr(dist, name)}
    # The name that everybody uses, and the one under which a function is pickled.
    with patch.multiple(dist, **replaced), patch.multiple(dist.distributed_c10d, **replaced):
        yield


def _largest(arguments: Sequence[Any]) -> Tensor:
    lists = [x for x in arguments if isinstance(x, list) and x]
    together = [torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype) for parts in lists]
    return max([*together, *(x for x in arguments if isinstance(x, Tensor))], key=Tensor.numel)
