"""Activation checkpointing: keep only the inputs of some blocks, and run them again when backward needs them.

A *schedule* says which. It is a nested tuple of blocks; a tuple inside a schedule is a checkpointed segment:

    (a, b, c, d)                    plain: everything is kept
    ((a, b), (c, d))                two segments: their two inputs are kept
    (((a,), (b,)), ((c,), (d,)))    segments inside segments

`run` executes a schedule; `accounting.checkpoint_costs` says what it costs, exactly, for equal blocks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cs336_systems.accounting.checkpoint_costs import Schedule
from cs336_systems.arguments import check_choice

Policy = Callable[[Sequence[Any]], Schedule]


class KeepsMatmuls(tuple):
    """A segment that keeps the results of its linear layers: backward makes the rest again, scores too."""


# Products with weights are `mm`; those of attention, a batch of heads, are `bmm`.
_keep_matmuls = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


def run(schedule: Schedule, x: Tensor) -> Tensor:
    """Send x through every block of the schedule; same values and gradients as without checkpoints.

    By its type a part is a segment that keeps its input (tuple), one that keeps matmuls too (KeepsMatmuls),
    or a block, which is called.
    """
    for part in schedule:
        if isinstance(part, tuple):
            options = {"context_fn": _keep_matmuls} if isinstance(part, KeepsMatmuls) else {}
            x = checkpoint(run, part, x, use_reentrant=False, **options)
        else:
            x = part(x)
    return x


def every_k(blocks: Sequence[Any], k: int) -> Schedule:
    """Segments of k blocks, k positive, the last one possibly shorter."""
    starts = range(0, len(blocks), k)
    return tuple(tuple(blocks[start : start + k]) for start in starts)


def sqrt_n(blocks: Sequence[Any]) -> Schedule:
    """About sqrt(N) segments of sqrt(N) blocks (Chen et al. 2016): memory O(sqrt(N)), one more forward."""
    k = round(math.sqrt(len(blocks)))
    return every_k(blocks, max(1, k))


def recursive(blocks: Sequence[Any]) -> Schedule:
    """Halves of halves, down to single blocks (Chen et al. 2016): memory O(log N), time O(N log N)."""
    if len(blocks) <= 1:
        return tuple(blocks)
    half = len(blocks) // 2
    return (recursive(blocks[:half]), recursive(blocks[half:]))


def from_start(blocks: Sequence[Any]) -> Schedule:
    """All blocks but the last are a segment, and so on inside it: every input is made from the very first.

    No schedule needs less: memory O(1). It runs N (N - 1) / 2 blocks again.
    """
    schedule: Schedule = ()
    for block in blocks:
        schedule = (schedule, block) if schedule else (block,)
    return schedule


def selective(blocks: Sequence[Any]) -> Schedule:
    """Every block a segment that keeps its matmuls with weights, the policy in PyTorch's documentation."""
    return tuple(KeepsMatmuls((block,)) for block in blocks)


def half_blocks(blocks: Sequence[Any]) -> Schedule:
    """Finer than `every_k(blocks, 1)`: attention and feed-forward of each block are segments of their own."""
    halves: Schedule = ()
    for block in blocks:
        halves += ((partial(_half_block, block.attn, block.ln1),),)
        halves += ((partial(_half_block, block.ffn, block.ln2),),)
    return halves


def _half_block(layer: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    return x + layer(norm(x))


POLICIES: dict[str, Policy] = {
    "none": tuple,  # keep everything
    "half blocks": half_blocks,
    "sqrt_n": sqrt_n,
    "recursive": recursive,
    "from start": from_start,
    "selective": selective,
}


def policy(name: str) -> Policy:
    """A policy by its name: one of POLICIES, or "every 3" for segments of three blocks.

    Raises:
        ValueError: there is none of that name; the message lists what there is.
    """
    word, _, number = name.partition(" ")
    if word == "every" and number.isdecimal() and int(number):
        return partial(every_k, k=int(number))
    check_choice("policy", name, ["every 1", "every 2 ..."] + list(POLICIES))
    return POLICIES[name]


def forward_with(model: nn.Module, policy: Policy, token_ids: Tensor) -> Tensor:
    """A TransformerLM's forward with its blocks checkpointed: `forward_with(model, sqrt_n, token_ids)`."""
    schedule = policy(list(model.layers))
    x = run(schedule, model.token_embeddings(token_ids))
    return model.lm_head(model.ln_final(x))
