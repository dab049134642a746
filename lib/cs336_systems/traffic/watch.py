"""Watching the collectives that somebody else calls: what they send, when, and who waits for it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.traffic.rings import RINGS

# What a collective is called by; checkers also look at those that no wrapper of ours uses.
_COLLECTIVES = {name: ring.__name__ for name, ring in RINGS.items()}
_COLLECTIVES |= {name: name for name in ("reduce", "all_gather", "reduce_scatter")}
# The handle of a collective that needs no waiting: it is over, or was not carried out.
_DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


class Message:
    """One call of a collective, and, to check others, its handle. It keeps no tensor that was waited for.

    numel, bytes, dtype, storage, address: of its largest tensor on this rank, or list of some.
    sent_bytes: what this rank sent to its neighbour, where collectives are carried out as rings.
    waits: how often wait() was called; `waited_for` holds where the handle was used in any way.
    """

    def __init__(self, collective: str, arguments: Sequence[Any]):
        self.collective = collective
        self.sent_bytes = 0
        self.waits = 0
        # No collective has another argument that is True.
        self.is_async = any(argument is True for argument in arguments)
        self.waited_for = not self.is_async
        self._work = _DONE
        groups = [argument for argument in arguments if isinstance(argument, dist.ProcessGroup)]
        self.ranks = dist.get_world_size(groups[0] if groups else None)
        tensors = max(_tensor_lists(arguments), key=lambda tensors: sum(x.numel() for x in tensors))
        self.numel = sum(x.numel() for x in tensors)
        self.bytes = sum(x.nbytes for x in tensors)
        self.dtype = tensors[0].dtype
        self.address = tensors[0].data_ptr()
        # Weak, or a message on record would keep memory alive that is being measured.
        self.storage = StorageWeakRef(tensors[0].untyped_storage())

    def __getattr__(self, name: str) -> Any:
        # Whoever looks at the handle in whichever way may have waited.
        self.waited_for = True
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        work = self._work
        self._work = _DONE
        self.waited_for = True
        self.waits += 1
        return work.wait(*args)


def _tensor_lists(arguments: Sequence[Any]) -> list[Sequence[Tensor]]:
    """The arguments that are tensors or lists of them; a barrier has none, and counts as an empty tensor."""
    lists = [x if isinstance(x, list | tuple) else [x] for x in arguments]
    return [x for x in lists if x and isinstance(x[0], Tensor)] or [[torch.empty(0)]]


@contextmanager
def watch_collectives(
    *,
    send: bool = True,
    as_rings: bool = False,
    notify: Callable[[Message], Any] = lambda message: None,
    checks: bool = False,
) -> Iterator[list[Message]]:
    """A list that fills with the collectives called inside, by whoever calls them as dist.all_reduce(...).

    It has all-reduces, broadcasts, and all-gathers and reduce-scatters of one tensor. Others are called and
    not noted: sends, all-to-alls, coalesced ones; without `checks` reduces and those of lists, too.

    Args:
        send: False leaves them out: every buffer stays as it is. What is then computed is wrong, but takes
            the time that it takes with nothing sent.
        as_rings: carry them out as rings, hop by hop, and count every send (see `rings`).
        notify: called with each when it has started.
        checks: return the messages as handles, to see whether somebody waits for them, and watch the names
            under which functions are pickled, too.
    """
    messages: list[Message] = []
    under_way: list[str] = []

    def watched(name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        # An older name of a function calls the newer one, which is no message of its own.
        if under_way or (name not in RINGS and not checks):
            return function(*args, **kwargs)
        message = Message(_COLLECTIVES[name], list(args) + list(kwargs.values()))
        work = _DONE
        under_way.append(name)
        try:
            if as_rings:
                message.sent_bytes = RINGS[name](*args, **kwargs)
            elif send:
                work = function(*args, **kwargs) or _DONE
        finally:
            under_way.pop()
        if checks:
            message._work = work
        messages.append(message)
        notify(message)
        if message.is_async:
            return message if checks else work
        return None

    names = [name for name in _COLLECTIVES if hasattr(dist, name)]
    calls = {name: partial(watched, name, getattr(dist, name)) for name in names}
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(dist, **calls))
        if checks:
            stack.enter_context(patch.multiple(dist.distributed_c10d, **calls))
        yield messages
