"""What our wrappers are compared with, given their interface: one process alone, and PyTorch's own DDP."""

import contextlib
import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# PyTorch 2.13 renamed this one and warns about the old name.
_parameters = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _parameters else "broadcast_buffers"


class Single(nn.Module):
    """One process that has nobody to talk to."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do."""


class TorchDDP(DistributedDataParallel):
    """PyTorch's own: it averages during backward and leaves nothing to finish.

    Like ours it leaves buffers alone between steps.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float):
        options = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}
        super().__init__(module, bucket_cap_mb=bucket_size_mb, **options)

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do."""
