"""How the training steps of the leaderboard are put together, by name."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from cs336_systems.attention.implementations import OURS
from cs336_systems.training.fused import use_fused_kernels, use_fused_loss


@dataclass(frozen=True)
class FullStep:
    """A training step of the leaderboard.

    sharding: one of parallel.strategies.SHARDINGS.
    prepare: called with the model before it is sharded; it imports Triton. attention: one of ATTENTION.
    checkpoints: which blocks go through PyTorch's checkpointing: "all", "none", "few" (as memory allows).
    keeps_attention: of as many as fit they keep attention's output and logsumexps beside the input.
    compiles: blocks go through torch.compile. selects: what they keep is chosen for the memory that is left.
    offloads: their moments are in the host's memory. max_ctas: SMs for NCCL; 0: as many as it wants.
    """

    sharding: str
    prepare: Callable[[nn.Module], object]
    attention: str = OURS
    checkpoints: str = "none"
    keeps_attention: bool = False
    compiles: bool = False
    selects: bool = False
    offloads: bool = False
    max_ctas: int = 0

    def wrap_blocks(self, model: nn.Module, plain: int = 0, attentive: int = 0) -> None:
        """Compile and checkpoint blocks in place; the last `plain` keep all, `attentive` others attention."""
        checkpointed = len(model.layers) - plain if self.checkpoints != "none" else 0
        for n, block in enumerate(model.layers):
            attends_once = n >= checkpointed - attentive
            wrapper = _attentive if attends_once else checkpoint_wrapper
            if n >= checkpointed:
                model.layers[n] = self._compiled(block)
            elif self.sharding == "fsdp2":
                # FSDP2's hooks are outside of both, so the checkpoint is compiled with the block.
                model.layers[n] = self._compiled(wrapper(block))
            else:
                # Our FSDP's hooks are the block's: inside of the checkpoint, they gather again.
                model.layers[n] = wrapper(self._compiled(block))

    def _compiled(self, module: nn.Module) -> nn.Module:
        return torch.compile(module, dynamic=False) if self.compiles else module

    def surroundings(self) -> AbstractContextManager:
        """In which its processes are started."""
        variables = {"NCCL_MAX_CTAS": str(self.max_ctas)} if self.max_ctas else {}
        return patch.dict(os.environ, variables)


# All that an attentive block keeps beside its input, as a byte of it takes the most FLOPs to make again.
_ATTENTIONS = ("cudnn_attention", "flash_attention", "flash_attention_for_cpu")
_KEPT = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in _ATTENTIONS]
_keep_attention = partial(create_selective_checkpoint_contexts, _KEPT)
_attentive = partial(checkpoint_wrapper, context_fn=_keep_attention)


def _use_blocks(model: nn.Module) -> None:
    # Not on top: fused_block needs Triton, and the names of the steps do not.
    from cs336_systems.training.fused_block import use_fused_blocks

    use_fused_blocks(model)


FULL_STEPS: dict[str, FullStep] = {
    "fsdp2_compiled": FullStep("fsdp2", use_fused_loss, "sdpa_cudnn", "all", compiles=True),
    "fsdp2_partly": FullStep("fsdp2", use_fused_loss, "sdpa_cudnn", "few", compiles=True),
    "fsdp2_selective": FullStep("fsdp2", use_fused_loss, "sdpa_cudnn", "few", True, compiles=True),
    "fsdp_compiled": FullStep("fsdp_block", use_fused_loss, "sdpa_cudnn", "all", compiles=True),
    "fused_kernels": FullStep("fsdp_block", use_fused_kernels, checkpoints="all"),
    "manual_backward": FullStep("fsdp_block", _use_blocks),
    "selective": FullStep("fsdp_block", _use_blocks, selects=True),
    "stacked": FullStep("fsdp_block", _use_blocks),
    "stacked_selective": FullStep("fsdp_block", _use_blocks, selects=True),
    "offloaded": FullStep("fsdp_block", _use_blocks, selects=True, offloads=True),
    "weights_kept": FullStep("fsdp_kept", _use_blocks, selects=True, offloads=True),
    "few_channels": FullStep("fsdp_block", _use_blocks, max_ctas=4),
}
