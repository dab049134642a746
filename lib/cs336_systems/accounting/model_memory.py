"""Bytes of a training step: what lives through it, and the most that it needs at once.

Parameters, gradients and the optimizer's moments are float32. A 16-bit type means autocast: linear layers and
attention matmuls run in 16 bit on copies of their weights and inputs; the residual stream, the norms, the
softmax and the loss stay float32.

Left out of the peak, because small: the rotary tables, token ids, temporaries with one number a row, and what
the allocator and the matrix library keep for themselves. With contexts no longer than a head is wide, and a
d_ff below 3 d_model, a forward without autograd may peak at another operation, up to a seventh higher.
"""

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
    autocast = n.copy_itemsize > 0
    stream = FLOAT32_BYTES * n.stream
    inverse_rms = FLOAT32_BYTES * n.tokens
    layer_input = n.itemsize * n.stream
    hidden = n.itemsize * n.hidden
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
        "attention weights": n.itemsize * n.scores,
    }
    fused = {"attention output": layer_input, "logsumexp of scores": FLOAT32_BYTES * n.rows}
    after_scores = {
        "output projection input": 0 if n.heads_last else layer_input,
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
        "weight copies": n.copy_itemsize * n.block_weights,
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
        "output head input": n.itemsize * n.stream,
        "logits": FLOAT32_BYTES * n.logits,
        "logsumexp": FLOAT32_BYTES * n.tokens,
        "weight copies": n.copy_itemsize * n.head_weight,
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
    parameters = parameter_bytes(config)
    if pass_ == "forward":
        phases = _forward_phases(n)
    else:
        phases = _training_phases(n, tuple(range(n.layers)) if schedule is None else schedule)
    moments = 0
    if pass_ == "train_step":
        moments = 2 * parameters
        # All gradients, and AdamW's one temporary, as large as the largest weight.
        largest = max(n.head_weight, n.feed_forward_weight, n.projection_weight)
        phases["optimizer"] = parameters + FLOAT32_BYTES * largest
    return {name: parameters + moments + alive for name, alive in phases.items()}


def head_phases(n: Counts, saved_by_blocks: int) -> dict[str, int]:
    """Bytes alive where backward begins.

    loss: everything saved, and three temporaries of the logits' size.
    output head: everything saved but the logits, the gradients of them, of its weight and of its input.
    """
    saved = saved_by_blocks + sum(saved_by_head(n).values())
    logits = FLOAT32_BYTES * n.logits
    gradients = n.itemsize * (n.logits + n.head_weight) + n.stream_itemsize * n.stream
    # At the output head the logits have left; their gradient, in the dtype of the matmul, is there.
    return {"loss": saved + 3 * logits, "output head": saved - logits + gradients}


def _forward_phases(n):
    """Without autograd only temporaries live, and the 16-bit weights that autocast keeps to the end.

    attention, at the softmax's division: the stream, its norm, projected q, k, v, rotated q, k; 12 bytes a
    score; the mask. feed-forward: the stream before and after attention, its norm; three hidden tensors.
    output head: the stream, its norm (16 bit: and a copy), the logits.
    """
    stream = FLOAT32_BYTES * n.stream
    attention = 2 * stream + 5 * n.itemsize * n.stream + 3 * FLOAT32_BYTES * n.scores + n.mask
    feed_forward = 3 * stream + 3 * n.itemsize * n.hidden
    output_head = 2 * stream + n.copy_itemsize * n.stream + n.itemsize * n.logits
    # Weights that have been copied by then, in the last block.
    all_blocks = n.layers * n.block_weights
    before_attention = all_blocks - n.projection_weight - 3 * n.feed_forward_weight
    before_w2 = all_blocks - n.feed_forward_weight
    return {
        "attention": attention + n.copy_itemsize * before_attention,
        "feed-forward": feed_forward + n.copy_itemsize * before_w2,
        "output head": output_head + n.copy_itemsize * (all_blocks + n.head_weight),
    }


def _training_phases(n, schedule):
    """Going back, saved activations leave and gradients arrive, so the peak is near one of the two ends.

    final norm: what the blocks saved, its input, five temporaries of the stream's size, the head's gradient.
    a block: what is saved besides it, the gradients of the blocks behind it and of the head.
    embedding: all gradients, and that of the stream.
    """
    saved_besides = saved_in_backward(schedule)
    if len(saved_besides) != n.layers:
        raise ValueError(f"the schedule has {len(saved_besides)} blocks, and the model {n.layers}")
    stream = FLOAT32_BYTES * n.stream
    saved_by_blocks = _saved_bytes(n, saved_after_forward(schedule))
    phases = _saving_phases(n, schedule) | head_phases(n, saved_by_blocks)
    phases["final norm"] = saved_by_blocks + 6 * stream + FLOAT32_BYTES * n.head_weight
    phases["embedding"] = parameter_bytes(n.config) + stream
    last = n.layers - 1
    for block, saved in enumerate(saved_besides):
        name = f"block {block}"
        if block == last:
            name = "last block"
        if block == 0:
            name = "first block"
        gradients = FLOAT32_BYTES * (n.head_weight + (last - block) * n.block_weights)
        for part, alive in _block_phases(n).items():
            phases[f"{part}, {name}"] = _saved_bytes(n, saved) + alive + gradients
    return phases


def _saved_bytes(n, saved):
    block = sum(saved_by_block(n).values())
    return saved.blocks * block + saved.inputs * FLOAT32_BYTES * n.stream


def _saving_phases(n, schedule):
    """In forward: what it would need without autograd, and what the blocks before have saved."""
    without_autograd = _forward_phases(n)
    phases = {}
    for part, before in (("attention", schedule[:-1]), ("output head", schedule)):
        saved = saved_after_forward(before)
        # Without autograd, too, the copies of weights are kept: they count once.
        copies = n.copy_itemsize * saved.blocks * n.block_weights
        phases[f"{part}, forward"] = without_autograd[part] + _saved_bytes(n, saved) - copies
    return phases


def _block_phases(n):
    """Bytes alive in one block's backward pass, apart from the other blocks and their gradients.

    feed-forward: all the block saved but w2's copy, and both gradients of silu(w1 x) * w3 x.
    softmax: what attention saved before its weights, and five tensors of the scores' size; v has
    left, but its gradient, as large, is there. Also the copies of the weights of q, k and v, and the
    gradients of the weights behind the softmax: of the output projection and of the feed-forward layer.
    """
    saved = saved_by_block(n)
    stream_gradient = FLOAT32_BYTES * n.stream
    # The gradient of w2 has taken the place of its copy.
    w2 = (FLOAT32_BYTES - n.copy_itemsize) * n.feed_forward_weight
    at_product = sum(saved.values()) + 2 * n.itemsize * n.hidden + w2
    names = list(saved)
    before_weights = names[: names.index("attention weights")]
    scores = 5 * FLOAT32_BYTES * n.scores
    copies = n.copy_itemsize * 3 * n.projection_weight
    gradients = FLOAT32_BYTES * (n.projection_weight + 3 * n.feed_forward_weight)
    at_softmax = sum(saved[name] for name in before_weights) + scores + copies + gradients
    return {
        "feed-forward": at_product + stream_gradient,
        "softmax": at_softmax + stream_gradient,
    }
