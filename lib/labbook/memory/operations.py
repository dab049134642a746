"""What an eager function asks of a machine, operation by operation: counted, and nothing computed.

Given tensors on the "meta" device, a function of any size can be asked, on any machine.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
    return sum(max(one.flops / matmul_tflops / 1e9, one.bytes_moved / copy_gbps / 1e6) for one in of)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        packet, name = operation.overloadpacket, operation.overloadpacket.__name__
        read, written = _sizes((args, kwargs)), _sizes(result)
        is_view = written.keys() <= read.keys() and not operation._schema.is_mutable
        if is_view or name.startswith(_NOTHING_MOVES):
            return result
        in_bytes = (_sizes((args[1:], kwargs)) if name in _OVERWRITE else read).total()
        if name in _GATHERS:
            in_bytes = min(in_bytes, written.total())
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        self.operations.append(Operation(name, flops, in_bytes + written.total()))
        return result


def _sizes(tree: Any) -> Counter[int]:
    """Bytes of the distinct elements by storage: what is expanded, or given twice, passes once."""
    sizes: Counter[int] = Counter()
    for tensor in (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = min(sizes[storage._cdata] + tensor.nbytes, storage.nbytes())
    return sizes
