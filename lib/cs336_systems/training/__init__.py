"""How a model is trained: activation checkpointing, and what low precision does to numbers."""

from cs336_systems.training import checkpointing, numerics
from cs336_systems.training.checkpointing import forward_with, strategy
from cs336_systems.training.numerics import (
    ACCUMULATIONS,
    Accumulation,
    autocast_dtypes,
    binades,
    layer_norm_stages,
    running_sum,
)

__all__ = [
    "ACCUMULATIONS",
    "Accumulation",
    "autocast_dtypes",
    "binades",
    "checkpointing",
    "forward_with",
    "layer_norm_stages",
    "numerics",
    "running_sum",
    "strategy",
]
