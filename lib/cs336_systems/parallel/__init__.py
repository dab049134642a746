"""Several processes at once: starting them, timing what they say to each other, training data-parallel."""

from cs336_systems.parallel.launch import WorkerError, launch
from cs336_systems.parallel.worker import WorkerContext

__all__ = ["WorkerContext", "WorkerError", "launch"]
