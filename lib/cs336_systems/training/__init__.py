"""How a model is trained: checkpointing, the fused kernels and the loss without logits.

`training.fused`, which puts a model on the fused kernels, needs triton and so is imported by its own name.
"""

from cs336_systems.training import checkpointing
from cs336_systems.training.checkpointing import forward_with, policy
from cs336_systems.training.full_steps import FULL_STEPS
from cs336_systems.training.linear_cross_entropy import linear_cross_entropy
from cs336_systems.training.steps import ModelSteps
