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
        self.live = dict[int, int]()
        self.peak = 0
        self._note(existing)

    def _note(self, results) -> None:
        for x in tree_iter(results):
            if isinstance(x, Tensor):
                self._follow(x.untyped_storage())
        self.peak = max(self.peak, sum(self.live.values()))

    def _follow(self, storage) -> None:
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self._note(result)
        return result
