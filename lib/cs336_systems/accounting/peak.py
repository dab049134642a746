"""The most memory a step needs at once: the largest of a few moments, each a sum of tensors known to live.

Left out, because small: the rotary tables, token ids, temporaries with one number a row, and what the
allocator and the matrix library keep for themselves.
"""

from cs336_systems.configs import ModelConfig

from .arguments import FLOAT32_BYTES, check_pass
from .elements import Elements
from .memory import (
    activation_bytes,
    block_activation_breakdown,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
)


def peak_bytes(
    config: ModelConfig, batch_size: int, context_length: int, pass_: str, dtype: str = "float32"
) -> int:
    """Most bytes alive at once in one step of the eager model with reference attention.

    Args:
        pass_: "forward" runs without autograd; "backward" and "forward_backward" have the same peak and start
            without gradients; "train_step" has AdamW's state from the start.
    """
    return max(peak_moments(config, batch_size, context_length, pass_, dtype).values())


def peak_moments(
    config: ModelConfig, batch_size: int, context_length: int, pass_: str, dtype: str = "float32"
) -> dict[str, int]:
    """Bytes alive at each moment that can be the peak; which one it is depends on the shape."""
    check_pass(pass_)
    n = Elements(config, batch_size, context_length, dtype)
    resident = parameter_bytes(config)
    moments = _forward_moments(n) if pass_ == "forward" else _backward_moments(n)
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


def _backward_moments(n: Elements) -> dict[str, int]:
    """Going back, saved activations leave and gradients arrive, so the peak is near one of the two ends.

    loss: everything saved, and three temporaries of the logits' size.
    output head: everything saved, the gradients of its weight and input.
    final norm: what the blocks saved, its input, and five temporaries of the stream's size.
    embedding: all gradients, and that of the stream.
    """
    run = (n.config, n.batch_size, n.context_length, n.dtype)
    saved = activation_bytes(*run)
    stream_gradient = FLOAT32_BYTES * n.stream
    saved_by_block = sum(block_activation_breakdown(*run).values())
    saved_by_blocks = n.config.num_layers * saved_by_block
    moments = {
        "loss": saved + 3 * FLOAT32_BYTES * n.logits,
        "output head": saved + (n.width - FLOAT32_BYTES) * n.logits + n.width * n.head + stream_gradient,
        "final norm": saved_by_blocks + FLOAT32_BYTES * (6 * n.stream + n.head),
        "embedding": gradient_bytes(n.config) + stream_gradient,
    }
    last = n.config.num_layers - 1
    for place, blocks_before in (("last block", last), ("first block", 0)):
        gradients = FLOAT32_BYTES * (n.head + (last - blocks_before) * n.block_weights)
        for part, alive in _block_moments(n).items():
            moments[f"{part}, {place}"] = blocks_before * saved_by_block + alive + gradients
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
