"""What an eager function asks of a machine, operation by operation: counted, and nothing computed.

Given tensors on the "meta" device, a function of any size can be asked, on any machine.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_NOTHING_MOVES = ("empty", "new_empty")  # memory is reserved and left as it is
_GATHERS = ("embedding", "index", "index_select", "gather")  # read only as much as they write
_OVERWRITE = ("copy_", "fill_", "zero_")  # do not read what they replace


@dataclass(frozen=True)
class Operation:
    """One operation of eager PyTorch, as a rule one kernel: it reads its inputs and writes its output."""

    name: str
    flops: int  # of a matmul; 0 for everything else
    bytes_moved: int


def operations_of(function: Callable[[], Any]) -> list[Operation]:
    """The operations that a call of the function runs, its backward included where it calls that.

    Views are left out: they move nothing. Temporaries inside one operation are not seen.
    """
    with _Recorder() as recorder:
        function()
    return recorder.operations


def sum_of_rooflines_ms(of: Iterable[Operation], matmul_tflops: float, copy_gbps: float) -> float:
    """Least time when each operation is a kernel of its own, waiting for the one before: a sum of rooflines.

    Args:
        of: what `operations_of` returned.
        matmul_tflops, copy_gbps: rates, as on a machine's card.
    """
    return 1e3 * sum(
        max(one.flops / (matmul_tflops * 1e12), one.bytes_moved / (copy_gbps * 1e9)) for one in of
    )


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        packet, name = operation.overloadpacket, operation.overloadpacket.__name__
        read, written = _tensors((args, kwargs)), _tensors(result)
        is_view = {_storage(t) for t in written} <= {_storage(t) for t in read}
        if name.startswith(_NOTHING_MOVES) or (is_view and not operation._schema.is_mutable):
            return result
        if name in _OVERWRITE:
            read = read[1:]
        in_bytes, out_bytes = _bytes(read), _bytes(written)
        if name in _GATHERS:
            in_bytes = min(in_bytes, out_bytes)
        count = flop_registry.get(packet, lambda *_, **__: 0)
        flops = count(*args, **kwargs, out_val=result)
        self.operations.append(Operation(name, flops, in_bytes + out_bytes))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct elements: what is expanded, or given twice, passes once."""
    sizes: dict[int, int] = defaultdict(int)
    limits: dict[int, int] = {}
    for tensor in tensors:
        sizes[_storage(tensor)] += tensor.numel() * tensor.element_size()
        limits[_storage(tensor)] = tensor.untyped_storage().nbytes()
    return sum(min(size, limits[storage]) for storage, size in sizes.items())
