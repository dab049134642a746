"""What the ranks send to each other: the collectives that are called, seen and, if asked, not carried out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

# Functions of torch.distributed, each with its collective and the places of its buffers. PyTorch 2.13 renamed
# two of them; where it has both names, the older calls the newer inside, which is not seen.
_FUNCTIONS = {
    "all_reduce": ("all_reduce", ("tensor",)),
    "broadcast": ("broadcast", ("tensor",)),
    "all_gather_into_tensor": ("all_gather", ("output_tensor", "input_tensor")),
    "all_gather_single": ("all_gather", ("output_tensor", "input_tensor")),
    "reduce_scatter_tensor": ("reduce_scatter", ("output", "input")),
    "reduce_scatter_single": ("reduce_scatter", ("output", "input")),
}


@dataclass(frozen=True)
class Message:
    """One call of a collective: which, its largest buffer on this rank in bytes, and that buffer's dtype."""

    collective: str
    bytes: int
    dtype: str


class Done:
    """The handle of a collective that needs no waiting: it is over, or was not carried out."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def watch_collectives(*, send: bool = True) -> Iterator[list[Message]]:
    """A list that fills with the collectives called inside, by whoever calls them as dist.all_reduce(...).

    Args:
        send: False leaves them out: every buffer stays as it is. What is then computed is wrong, but takes
            the time that it takes with nothing sent.
    """
    messages: list[Message] = []
    names = {name: getattr(dist, name) for name in _FUNCTIONS if hasattr(dist, name)}
    replaced = {name: _watched(name, function, messages, send) for name, function in names.items()}
    with patch.multiple(dist, **replaced):
        yield messages


def _watched(name: str, function: Callable, messages: list[Message], send: bool) -> Callable:
    collective, places = _FUNCTIONS[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        buffers = [*args[: len(places)], *(kwargs[place] for place in places[len(args) :])]
        largest: Tensor = max(buffers, key=lambda buffer: buffer.nbytes)
        messages.append(Message(collective, largest.nbytes, str(largest.dtype).removeprefix("torch.")))
        if send:
            return function(*args, **kwargs)
        return Done() if kwargs.get("async_op") else None

    return call
