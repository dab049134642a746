"""How the training steps of the leaderboard are put together, by name."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cs336_systems.training.fused import use_fused_loss

aten = torch.ops.aten
# Names, then the operators of these names: what keeping a byte of saves the most FLOPs.
_ATTENTIONS = ("cudnn_attention", "flash_attention", "flash_attention_for_cpu")
_ATTENTIONS = [getattr(aten, f"_scaled_dot_product_{name}").default for name in _ATTENTIONS]


def keep_attention() -> Any:
    """Contexts of a checkpoint that keeps attention's output and logsumexps beside its input."""
    return create_selective_checkpoint_contexts(_ATTENTIONS)


def keep_matmuls() -> Any:
    """Of one that keeps every second matmul as well, the first of them, as torchtitan's SelectiveAC."""
    matmuls = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = operation in _ATTENTIONS
        # Backward runs the block again: there the count begins anew, so that the same ones are found.
        if operation is aten.mm.default:
            matmuls[context.is_recompute] += 1
            keeps = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@dataclass(frozen=True)
class FullStep:
    """A training step of the leaderboard.

    sharding: one of parallel.strategies.SHARDINGS.
    prepare: called with the model before it is sharded; it imports Triton.
    keeps: of a block that is compiled and checkpointed: the contexts of its checkpoint. None means a step of
        ours, here and in `leaderboard`: its blocks attend by our kernels, are not wrapped, and keep what
        `ShardedModel.keep` says.
    compiles: such blocks go through torch.compile. offloads: their moments are in the host's memory.
    """

    sharding: str
    prepare: Callable[[nn.Module], object]
    keeps: Callable[[], Any] | None = None
    compiles: bool = False
    offloads: bool = False

    def wrap_blocks(self, model: nn.Module, whole: int = 0) -> None:
        """Checkpoint and compile blocks in place; the last `whole` keep all, without a checkpoint."""
        if self.keeps is None:
            return
        checkpointed = len(model.layers) - whole
        for n, block in enumerate(model.layers):
            # FSDP2's hooks are outside of both, so the checkpoint is compiled with the block.
            if n < checkpointed:
                block = checkpoint_wrapper(block, context_fn=self.keeps)
            if self.compiles:
                block = torch.compile(block, dynamic=False)
            model.layers[n] = block


def _use_blocks(model: nn.Module) -> None:
    # Not on top: fused_block needs Triton, and the names of the steps do not.
    from cs336_systems.training.fused_block import use_fused_blocks

    use_fused_blocks(model)


_fsdp2 = partial(FullStep, "fsdp2", use_fused_loss, compiles=True)
_ours = partial(FullStep, "fsdp_block", _use_blocks)
FULL_STEPS: dict[str, FullStep] = {
    "fsdp2_selective": _fsdp2(keep_attention),
    "fsdp2_matmuls": _fsdp2(keep_matmuls),
    "stacked_selective": _ours(),
    "offloaded": _ours(offloads=True),
}
