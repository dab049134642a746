"""Several processes at once: starting them, timing what they say to each other, training data-parallel."""

from cs336_systems.parallel.ddp import DataParallel, FlatDDP, NaiveDDP
from cs336_systems.parallel.launch import WorkerError, launch
from cs336_systems.parallel.overlapped import BucketedDDP, OverlappedDDP
from cs336_systems.parallel.worker import WorkerContext, backends_here

__all__ = [
    "BucketedDDP",
    "DataParallel",
    "FlatDDP",
    "NaiveDDP",
    "OverlappedDDP",
    "WorkerContext",
    "WorkerError",
    "backends_here",
    "launch",
]
