"""The most memory a step needs at once: the largest of a few moments, each a sum of tensors known to live.

Left out, because small: the rotary tables, token ids, temporaries with one number a row, and what the
allocator and the matrix library keep for themselves.
"""

from cs336_systems.accounting.arguments import FLOAT32_BYTES, check_pass
from cs336_systems.accounting.checkpoint_costs import Held, Plan, held_after_forward, held_in_backward
from cs336_systems.accounting.element_counts import Elements
from cs336_systems.accounting.model_memory import (
    block_activation_breakdown,
    gradient_bytes,
    head_activation_breakdown,
    optimizer_bytes,
    parameter_bytes,
)
from cs336_systems.configs import ModelConfig


def peak_bytes(
    config: ModelConfig,
    batch_size: int,
    context_length: int,
    pass_: str,
    dtype: str = "float32",
    plan: Plan | None = None,
) -> int:
    """Most bytes alive at once in one step of the eager model with plain attention.

    Args:
        pass_: "forward" runs without autograd; "backward" and "forward_backward" have the same peak and start
            without gradients; "train_step" has AdamW's state from the start.
        plan: which blocks are checkpointed, see `checkpoint_costs`; by default none is.

    Raises:
        ValueError: the plan has not as many blocks as the model.
    """
    return max(peak_moments(config, batch_size, context_length, pass_, dtype, plan).values())


def peak_moments(
    config: ModelConfig,
    batch_size: int,
    context_length: int,
    pass_: str,
    dtype: str = "float32",
    plan: Plan | None = None,
) -> dict[str, int]:
    """Bytes alive at each moment that can be the peak; which one it is depends on the shape."""
    check_pass(pass_)
    n = Elements(config, batch_size, context_length, dtype)
    plan = tuple(range(config.num_layers)) if plan is None else plan
    resident = parameter_bytes(config)
    moments = _forward_moments(n) if pass_ == "forward" else _training_moments(n, plan)
    if pass_ == "train_step":
        resident += optimizer_bytes(config)
        # AdamW's one temporary is as large as the largest weight.
        moments["optimizer"] = gradient_bytes(config) + FLOAT32_BYTES * max(n.head, n.feed_forward)
    return {name: resident + moment for name, moment in moments.items()}


def _forward_moments(n: Elements) -> dict[str, int]:
    """Without autograd only temporaries live, and the 16-bit weights that autocast keeps to the end.

    attention, at the softmax's division: the stream, its norm, projected q, k, v, rotated q, k; 12 bytes a
    score; the mask. feed-forward: the stream before and after attention, its norm; three hidden tensors.
    output head: the stream, its norm (16 bit: and a copy), the logits.
    """
    blocks = n.config.num_layers * n.block_weights
    return {
        "attention": n.copy_width * (blocks - n.projection - 3 * n.feed_forward)
        + (2 * FLOAT32_BYTES + 5 * n.width) * n.stream
        + 3 * FLOAT32_BYTES * n.scores
        + n.context_length**2,
        "feed-forward": n.copy_width * (blocks - n.feed_forward)
        + 3 * FLOAT32_BYTES * n.stream
        + 3 * n.width * n.hidden,
        "output head": n.copy_width * (blocks + n.head + n.stream)
        + 2 * FLOAT32_BYTES * n.stream
        + n.width * n.logits,
    }


def _training_moments(n: Elements, plan: Plan) -> dict[str, int]:
    """Going back, saved activations leave and gradients arrive, so the peak is near one of the two ends.

    in forward: what it would need without autograd, and what the blocks before have saved.
    loss: everything saved, and three temporaries of the logits' size.
    output head: everything saved, the gradients of its weight and input.
    final norm: what the blocks saved, its input, and five temporaries of the stream's size.
    a block: what is held besides it, the gradients of the blocks behind it and of the head.
    embedding: all gradients, and that of the stream.
    """
    run = (n.config, n.batch_size, n.context_length, n.dtype)
    beside = held_in_backward(plan)
    if len(beside) != n.config.num_layers:
        raise ValueError(f"the plan has {len(beside)} blocks, and the model {n.config.num_layers}")
    stream = FLOAT32_BYTES * n.stream
    saved_by_block = sum(block_activation_breakdown(*run).values())

    def saved_by(held: Held) -> int:
        return held.blocks * saved_by_block + held.inputs * stream

    def held_by_forward(plan: Plan) -> int:
        """What blocks saved, less the weights' copies: `_forward_moments` has those of all blocks."""
        held = held_after_forward(plan)
        return saved_by(held) - n.copy_width * held.blocks * n.block_weights

    saved_by_blocks = saved_by(held_after_forward(plan))
    saved = saved_by_blocks + sum(head_activation_breakdown(*run).values())
    forward = _forward_moments(n)
    last = n.config.num_layers - 1
    moments = {
        "attention, forward": forward["attention"] + held_by_forward(plan[:-1]),
        "output head, forward": forward["output head"] + held_by_forward(plan),
        "loss": saved + 3 * FLOAT32_BYTES * n.logits,
        "output head": saved + (n.width - FLOAT32_BYTES) * n.logits + n.width * n.head + stream,
        "final norm": saved_by_blocks + FLOAT32_BYTES * (6 * n.stream + n.head),
        "embedding": gradient_bytes(n.config) + stream,
    }
    for block, held in enumerate(beside):
        where = {last: "last block", 0: "first block"}.get(block, f"block {block}")
        gradients = FLOAT32_BYTES * (n.head + (last - block) * n.block_weights)
        for part, alive in _block_moments(n).items():
            moments[f"{part}, {where}"] = saved_by(held) + alive + gradients
    return moments


def _block_moments(n: Elements) -> dict[str, int]:
    """Bytes alive in one block's backward pass, apart from the other blocks and their gradients.

    feed-forward: all the block saved but w2's copy, and both gradients of silu(w1 x) * w3 x.
    softmax: what attention saved before its weights, and five tensors of the scores' size; v has
    left, but its gradient, as large, is there.
    """
    saved = block_activation_breakdown(n.config, n.batch_size, n.context_length, n.dtype)
    before_weights = (
        "ln1 input",
        "ln1 1/rms",
        "ln1 normalised",
        "q, k, v projection input",
        "q, k, v",
        "causal mask",
        "softmax exponentials",
        "softmax row sums",
    )
    stream_gradient = FLOAT32_BYTES * n.stream
    return {
        "feed-forward": sum(saved.values())
        + (FLOAT32_BYTES - n.copy_width) * n.feed_forward
        + 2 * n.width * n.hidden
        + stream_gradient,
        "softmax": sum(saved[name] for name in before_weights)
        + n.copy_width * 3 * n.projection
        + FLOAT32_BYTES * (n.projection + 3 * n.feed_forward)
        + 5 * FLOAT32_BYTES * n.scores
        + stream_gradient,
    }
