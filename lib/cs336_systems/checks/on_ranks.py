"""Properties of a reader's class, tried by several processes: the runner, and what the properties use."""

import contextlib
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

from cs336_systems.checks.exercise import show
from cs336_systems.parallel import WorkerContext, WorkerError, stream

_WATCHED = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single")
_WATCHED += ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
# What is wrong on this rank and how to mend it, the likeliest reason first. Only the first is used, so
# all communication comes before it: a rank that returns early deadlocks the rest.
Mistakes = Callable[[WorkerContext, Any], Iterator[str]]


class Unwatched(str):
    """Why a property cannot be tried on this candidate: no mistake of it."""


@dataclass(frozen=True)
class Property:
    """What a class has to do: a name, printed when it holds, and what finds its mistakes."""

    name: str
    mistakes: Mistakes


def holds(name: str) -> Callable[[Mistakes], Property]:
    """Makes a property of the function that finds its mistakes."""
    return partial(Property, name)


def check_on_ranks(
    candidate: Callable[..., Any],
    arguments: dict[str, Any],
    properties: Sequence[Property],
    world_size: int = 2,
    timeout_s: float = 60.0,
) -> None:
    """Try properties in CPU processes, up to the first that does not hold on every rank; print what holds.

    Args:
        candidate: what is tried, given these arguments; it may be defined in a notebook.

    Raises:
        AssertionError: what is wrong, where, and how to mend it.
    """
    name = getattr(candidate, "__name__", repr(candidate))
    pickled = cloudpickle.dumps((partial(candidate, **arguments), properties))
    tried, right = stream(try_properties, world_size, pickled, backend="gloo", timeout_s=timeout_s), 0
    try:
        while True:
            show(line := next(tried))
            right += line.startswith("✓")
    except StopIteration as end:
        failures = end.value[0]
    except WorkerError as error:
        raise AssertionError(f"{name} did not get through: {error}") from error
    if failures:
        raise AssertionError("\n".join(f"{name}, {failure}" for failure in failures))
    show(f"{name}: {right} cases right on {world_size} ranks")


def try_properties(context: WorkerContext, pickled: bytes) -> list[str]:
    """What is wrong in the first property that fails on any rank, of a pickled (candidate, properties)."""
    with _watched_messages():  # before the class is loaded, whichever way it imports the functions
        candidate, properties = cloudpickle.loads(pickled)
        for each in properties:
            works: list[Work] = []
            with observed(lambda message, works=works: works.extend(filter(None, [message.work]))):
                mistake = next(each.mistakes(context, candidate), None)
            # What is still under way may or may not have arrived, so it is the better explanation.
            by_rank = from_all(_unfinished(works) or mistake)
            if all(isinstance(own, Unwatched) for own in by_rank):
                context.send(f"· {each.name}: not watched ({mistake})")
            elif any(by_rank):
                ranks = {text: [str(n) for n, own in enumerate(by_rank) if own == text] for text in by_rank}
                return [f"rank {', '.join(where)}: {text}" for text, where in ranks.items() if text]
            else:
                context.send(f"✓ {each.name}")
    return []


def from_all(own: Any) -> list[Any]:
    """What every rank has, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def unlike(found: Tensor, wanted: Tensor, diagnoses: dict[str, Tensor], otherwise: str) -> Iterator[str]:
    """Nothing where a tensor is the wanted one; else the diagnosis whose tensor it is."""
    if not close(found, wanted):
        yield next((text for text, other in diagnoses.items() if close(found, other)), otherwise)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)


class Work:
    """The handle of an asynchronous message, which remembers whether it was waited for."""

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


def _unfinished(works: Sequence[Work]) -> str:
    names = [work.name for work in works if not work.waited_for]
    if not names:
        return ""
    return (
        f"{len(names)} of {len(works)} {names[0].replace('_', '-')}s may still be under way at the end. Keep "
        f"every handle that {names[0]}(..., async_op=True) returns, and wait() for it."
    )


@dataclass(frozen=True)
class Message:
    """A message that the candidate has started, by this function of torch.distributed."""

    name: str
    buffer: Tensor  # the largest; of a list of tensors, an empty one that stands for all together
    work: Work | None  # the handle that was returned, if any


_observers: list[Callable[[Message], None]] = []


@contextlib.contextmanager
def observed(observer: Callable[[Message], None]) -> Iterator[None]:
    """The observer is called with each message that the candidate starts."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextlib.contextmanager
def _watched_messages() -> Iterator[None]:
    under_way: list[str] = []  # an old name of a function calls the new one, which is no message of its own

    def watched(name: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
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

    replaced = {name: partial(watched, name, getattr(dist, name)) for name in _WATCHED if hasattr(dist, name)}
    # The name that everybody uses, and the one under which a function is pickled.
    with patch.multiple(dist, **replaced), patch.multiple(dist.distributed_c10d, **replaced):
        yield


def _largest(arguments: Sequence[Any]) -> Tensor:
    lists = [x for x in arguments if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
    together = [torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype) for parts in lists]
    tensors = [*together, *(x for x in arguments if isinstance(x, Tensor))]
    return max(tensors, key=Tensor.numel, default=torch.empty(0))
