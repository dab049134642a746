"""Bytes of a training step: what lives through it, and the most that it needs at once.

Parameters, gradients and the optimizer's moments are float32. A 16-bit type means autocast: linear layers and
attention matmuls run in 16 bit on copies of their weights and inputs; the residual stream, the norms, the
softmax and the loss stay float32.

Left out of the peak, because small: the rotary tables, token ids, temporaries with one number a row, and what
the allocator and the matrix library keep for themselves.
"""

from itertools import takewhile

from cs336_systems.accounting.checkpoint_costs import (
    Schedule,
    saved_after_forward,
    saved_in_backward,
)
from cs336_systems.accounting.element_counts import FLOAT32_BYTES, Counts
from cs336_systems.accounting.flops import PASSES, parameter_count
from cs336_systems.arguments import check_choice
from cs336_systems.configs import ModelConfig


def parameter_bytes(config: ModelConfig) -> int:
    """4 bytes a parameter, under autocast too. So are gradients, and each of AdamW's two moments."""
    return FLOAT32_BYTES * parameter_count(config)


def saved_by_block(n: Counts) -> dict[str, int]:
    """Bytes that one TransformerBlock saves for its backward pass, by name, in the order of the forward.

    Parameters themselves are not counted; the 16-bit copies that autocast makes of them are. Autocast also
    copies the input of linear layers, once for every layer that reads it.
    """
    autocast = n.copy_width > 0
    stream = FLOAT32_BYTES * n.stream
    inverse_rms = FLOAT32_BYTES * n.tokens
    layer_input = n.width * n.stream
    hidden = n.width * n.hidden
    before_scores = {
        "ln1 input": stream,
        "ln1 1/rms": inverse_rms,
        "ln1 normalised": stream,
        "q, k, v projection input": layer_input * (3 if autocast else 1),
        "q, k, v": 3 * layer_input,
    }
    plain = {
        "causal mask": n.mask,
        "softmax exponentials": FLOAT32_BYTES * n.scores,
        "softmax row sums": FLOAT32_BYTES * n.rows,
        "attention weights": n.width * n.scores,
    }
    fused = {"attention output": layer_input, "logsumexp of scores": FLOAT32_BYTES * n.rows}
    after_scores = {
        "output projection input": layer_input * (not n.heads_last),
        "ln2 input": stream,
        "ln2 1/rms": inverse_rms,
        "ln2 normalised": stream,
    }
    feed_forward = {
        "w1, w3 input": layer_input * (2 if autocast else 1),
        "w1 output": hidden,
        "sigmoid": hidden,
        "silu": hidden,
        "w3 output": hidden,
        "w2 input": hidden,
        "weight copies": n.copy_width * n.block_weights,
    }
    scores = fused if n.fused_attention else plain
    return before_scores | scores | after_scores | feed_forward


def saved_by_head(n: Counts) -> dict[str, int]:
    """Bytes saved for backward by final norm, output head and cross-entropy."""
    stream = FLOAT32_BYTES * n.stream
    return {
        "ln_final input": stream,
        "ln_final 1/rms": FLOAT32_BYTES * n.tokens,
        "ln_final normalised": stream,
        "output head input": n.width * n.stream,
        "logits": FLOAT32_BYTES * n.logits,
        "logsumexp": FLOAT32_BYTES * n.tokens,
        "weight copies": n.copy_width * n.head,
    }


def activation_bytes(
    config: ModelConfig, batch_size: int, context_length: int, dtype: str = "float32"
) -> int:
    """Bytes that cross_entropy(model(tokens), targets) saves for backward, in all layers together.

    Token ids and targets, the rotary tables and the parameters are not counted: they are there anyway.
    """
    n = Counts(config, batch_size, context_length, dtype)
    return n.layers * sum(saved_by_block(n).values()) + sum(saved_by_head(n).values())


def peak_bytes(
    config: ModelConfig, batch_size: int, context_length: int, pass_: str, dtype: str = "float32",
    schedule: Schedule | None = None,
) -> int:  # fmt: skip
    """Most bytes alive at once in one step of the eager model with plain attention.

    Args:
        pass_: "forward" runs without autograd; "backward" and "forward_backward" have the same peak and start
            without gradients; "train_step" has AdamW's state from the start.
        schedule: which blocks are checkpointed, see `checkpoint_costs`; by default none is.
    """
    return max(peak_phases(config, batch_size, context_length, pass_, dtype, schedule).values())


def peak_phases(
    config: ModelConfig, batch_size: int, context_length: int, pass_: str, dtype: str = "float32",
    schedule: Schedule | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes alive in each phase that can have the peak; which one has it depends on the shape."""
    check_choice("pass", pass_, PASSES)
    n = Counts(config, batch_size, context_length, dtype)
    schedule = tuple(range(n.layers)) if schedule is None else schedule
    resident = parameter_bytes(config)
    phases = _forward_phases(n) if pass_ == "forward" else _training_phases(n, schedule)
    if pass_ == "train_step":
        resident *= 3
        # AdamW's one temporary is as large as the largest weight.
        phases["optimizer"] = parameter_bytes(config) + FLOAT32_BYTES * max(n.head, n.feed_forward)
    return {name: resident + alive for name, alive in phases.items()}


def _forward_phases(n):
    """Without autograd only temporaries live, and the 16-bit weights that autocast keeps to the end.

    attention, at the softmax's division: the stream, its norm, projected q, k, v, rotated q, k; 12 bytes a
    score; the mask. feed-forward: the stream before and after attention, its norm; three hidden tensors.
    output head: the stream, its norm (16 bit: and a copy), the logits.
    """
    blocks = n.layers * n.block_weights
    copies = n.copy_width * (blocks - n.feed_forward)
    streams = (2 * FLOAT32_BYTES + 5 * n.width) * n.stream
    quotient = 3 * FLOAT32_BYTES * n.scores + n.mask
    logits = n.width * n.logits + n.copy_width * (n.head + n.stream)
    in_attention = copies - n.copy_width * (n.projection + 2 * n.feed_forward)
    return {
        "attention": in_attention + streams + quotient,
        "feed-forward": copies + 3 * FLOAT32_BYTES * n.stream + 3 * n.width * n.hidden,
        "output head": n.copy_width * blocks + 2 * FLOAT32_BYTES * n.stream + logits,
    }


def _training_phases(n, schedule):
    """Going back, saved activations leave and gradients arrive, so the peak is near one of the two ends.

    in forward: what it would need without autograd, and what the blocks before have saved.
    loss: everything saved, and three temporaries of the logits' size.
    output head: everything saved, the gradients of its weight and input.
    final norm: what the blocks saved, its input, and five temporaries of the stream's size.
    a block: what is saved besides it, the gradients of the blocks behind it and of the head.
    embedding: all gradients, and that of the stream.
    """
    others = saved_in_backward(schedule)
    if len(others) != n.layers:
        raise ValueError(f"the schedule has {len(others)} blocks, and the model {n.layers}")
    stream = FLOAT32_BYTES * n.stream
    block_saves = sum(saved_by_block(n).values())

    def bytes_of(saved):
        return saved.blocks * block_saves + saved.inputs * stream

    def saved_by_forward(schedule):
        """What blocks saved, less the weights' copies: `_forward_phases` has those of all blocks."""
        saved = saved_after_forward(schedule)
        return bytes_of(saved) - n.copy_width * saved.blocks * n.block_weights

    saved_by_blocks = bytes_of(saved_after_forward(schedule))
    saved = saved_by_blocks + sum(saved_by_head(n).values())
    forward = _forward_phases(n)
    head_gradients = (n.width - FLOAT32_BYTES) * n.logits + n.width * n.head + stream
    phases = {
        "attention, forward": forward["attention"] + saved_by_forward(schedule[:-1]),
        "output head, forward": forward["output head"] + saved_by_forward(schedule),
    }
    phases |= {
        "loss": saved + 3 * FLOAT32_BYTES * n.logits,
        "output head": saved + head_gradients,
        "final norm": saved_by_blocks + FLOAT32_BYTES * (6 * n.stream + n.head),
        "embedding": parameter_bytes(n.config) + stream,
    }
    last = n.layers - 1
    for block, of_others in enumerate(others):
        where = {last: "last block", 0: "first block"}.get(block, f"block {block}")
        gradients = FLOAT32_BYTES * (n.head + (last - block) * n.block_weights)
        for part, alive in _block_phases(n).items():
            phases[f"{part}, {where}"] = bytes_of(of_others) + alive + gradients
    return phases


def _block_phases(n):
    """Bytes alive in one block's backward pass, apart from the other blocks and their gradients.

    feed-forward: all the block saved but w2's copy, and both gradients of silu(w1 x) * w3 x.
    softmax: what attention saved before its weights, and five tensors of the scores' size; v has
    left, but its gradient, as large, is there.
    """
    saved = saved_by_block(n)
    before_weights = takewhile(lambda name: name != "attention weights", saved)
    stream_gradient = FLOAT32_BYTES * n.stream
    gradient_of_w2 = FLOAT32_BYTES * n.feed_forward - n.copy_width * n.feed_forward
    gradients_of_weights = FLOAT32_BYTES * (n.projection + 3 * n.feed_forward)
    copies = n.copy_width * 3 * n.projection
    scores = 5 * FLOAT32_BYTES * n.scores
    at_scores = sum(saved[name] for name in before_weights) + scores + copies
    at_product = sum(saved.values()) + 2 * n.width * n.hidden
    return {
        "feed-forward": at_product + gradient_of_w2 + stream_gradient,
        "softmax": at_scores + gradients_of_weights + stream_gradient,
    }
