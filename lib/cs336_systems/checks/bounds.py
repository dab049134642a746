"""In Triton's interpreter a kernel that reaches beyond its tensors is told so, and stopped before it does.

On a CPU such a store hits whatever the allocator keeps there, and ends the process, a notebook's kernel too.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

# Methods of the interpreter, what they do, and which of their arguments are the addresses and the mask.
_ACCESSES = {
    "create_masked_load": ("loads", 0, 1),
    "create_masked_store": ("stores", 0, 2),
    "create_atomic_rmw": ("adds", 1, 3),
}


@contextlib.contextmanager
def inside_tensors() -> Iterator[None]:
    """Interpreted kernels raise an AssertionError instead of an access outside the tensors they are given."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    running: dict[str, Any] = {"name": "", "extents": []}  # the kernel, and where its tensors lie
    arguments_of = executor._init_args_hst

    def to_host(self: Any, *given: Any) -> Any:
        positional, by_name = host = arguments_of(self, *given)
        tensors = _tensors([*positional, *by_name.values()])
        running.update(name=self.fn.__name__, extents=[_extent(x) for x in tensors if x.numel()])
        return host

    def watched(original: Callable, does: str, addresses: int, mask: int) -> Callable:
        def access(self: Any, *args: Any) -> Any:
            places = args[addresses].data
            places = places[np.broadcast_to(args[mask].data.astype(bool), places.shape)]
            inside = np.zeros(places.shape, bool)
            for first, end in running["extents"]:
                inside |= (places >= first) & (places < end)
            assert inside.all(), (
                f"{running['name']} {does} {np.sum(~inside)} numbers outside its tensors: "
                "is the place right, and are both edges masked?"
            )
            return original(self, *args)

        return access

    replaced = {name: watched(getattr(builder, name), *how) for name, how in _ACCESSES.items()}
    with patch.multiple(builder, **replaced), patch.object(executor, "_init_args_hst", to_host):
        yield


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for x in arguments:
        if isinstance(x, tuple):
            yield from _tensors(x)
        elif isinstance(x := getattr(x, "base", x), Tensor):  # of a descriptor or a wrapper: its tensor
            yield x


def _extent(x: Tensor) -> tuple[int, int]:
    """The addresses of its first number and behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
