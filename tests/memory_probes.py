"""What a computation keeps in memory, seen without a GPU: all storages alive at once."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operation that makes it to its end; `peak` is the most alive at once.

    Temporaries inside one operation are not seen. existing: what is there before, in lists and the like.
    """

    def __init__(self, *existing):
        super().__init__()
        self.live = weakref.WeakSet()
        self.peak = 0
        self._note(existing)

    def _note(self, results) -> None:
        self.live.update(x.untyped_storage() for x in tree_iter(results) if isinstance(x, Tensor))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.live))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self._note(result)
        return result
