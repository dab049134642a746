"""How the training steps of the leaderboard are put together, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from cs336_systems.attention.implementations import OURS
from cs336_systems.training.fused import use_fused_blocks, use_fused_kernels, use_fused_loss


@dataclass(frozen=True)
class FullStep:
    """A training step of the leaderboard.

    sharding: one of parallel.strategies.SHARDINGS.
    prepare: called with the model before it is sharded; it imports Triton.
    attention: one of attention.implementations.ATTENTION.
    checkpoints: the share of blocks that keep their input only, through PyTorch's checkpointing.
    compiles: blocks go through torch.compile.
    selects: what blocks keep is solved for the memory that is left.
    """

    sharding: str
    prepare: Callable[[nn.Module], object]
    attention: str = OURS
    checkpoints: float = 0.0
    compiles: bool = False
    selects: bool = False


FULL_STEPS: dict[str, FullStep] = {
    "fsdp2_compiled": FullStep("fsdp2", use_fused_loss, "sdpa_cudnn", checkpoints=1, compiles=True),
    "fsdp2_partly": FullStep("fsdp2", use_fused_loss, "sdpa_cudnn", checkpoints=0.6, compiles=True),
    "fsdp_compiled": FullStep("fsdp_block", use_fused_loss, "sdpa_cudnn", checkpoints=1, compiles=True),
    "fused_kernels": FullStep("fsdp_block", use_fused_kernels, checkpoints=1),
    "manual_backward": FullStep("fsdp_block", use_fused_blocks),
    "selective": FullStep("fsdp_block", use_fused_blocks, selects=True),
}
