"""What a computation keeps in memory, seen without a GPU: all storages alive at once."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operation that makes it to its end; `peak` is the most alive at once.

    Temporaries inside one operation are not seen.
    """

    def __init__(self, *existing: Tensor):
        super().__init__()
        self.live, self.peak = dict[int, int](), 0
        self._note(existing)

    def _note(self, made) -> None:
        for storage in (x.untyped_storage() for x in tree_iter(made) if isinstance(x, Tensor)):
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self._note(result)
        return result
