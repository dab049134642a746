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
        self.live: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in existing:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live:
            return
        self.live[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self.live.pop(key)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._add(value)
        return result
