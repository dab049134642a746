"""Attention alone, q, k, v of (batch, context, d_head): plain, and fused, which never writes its scores down.

A 16-bit type means that the tensors themselves have it; the softmax inside is float32 all the same. A
"sequence" of fused attention is one head of one batch entry. pass_: forward, backward, forward_backward.
"""

from cs336_systems.accounting.element_counts import FLOAT32_BYTES, dtype_bytes

# Forwards that a pass is worth, in FLOPs of plain attention and in tensors that fused attention moves.
_FORWARDS = {"forward": 1, "backward": 2, "forward_backward": 3}
_MATMULS = {"forward": 2, "backward": 5, "forward_backward": 7}  # of fused attention


def attention_flops(
    batch_size: int, context_length: int, d_head: int, pass_: str = "forward"
) -> int:
    """Operations in the matmuls: 4 B T^2 d forward, twice that backward; the masked half is included."""
    return _FORWARDS[pass_] * 4 * batch_size * context_length**2 * d_head


def attention_saved_bytes(
    batch_size: int,
    context_length: int,
    d_head: int,
    dtype: str = "float32",
    is_causal: bool = False,
) -> int:
    """Bytes saved for backward: q, k, v, and per score its float32 exponential and its attention weight.

    float32: 12 B T d + 8 B T^2 + 4 B T, the mask T^2 more. It grows with the square of the context.
    """
    itemsize = dtype_bytes(dtype)
    rows = batch_size * context_length
    exponentials_and_sums = FLOAT32_BYTES * rows * (context_length + 1)
    inputs_and_weights = itemsize * rows * (3 * d_head + context_length)
    mask = context_length**2 if is_causal else 0
    return inputs_and_weights + exponentials_and_sums + mask


def attention_peak_breakdown(
    batch_size: int, context_length: int, d_head: int, pass_: str = "forward_backward",
    dtype: str = "float32", is_causal: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Bytes alive at the peak, by what they are, for a context at least as long as a head is wide.

    Both peaks lie in the softmax, at its division, and are 12 bytes a score forward and 24 backward, whatever
    the type: 16-bit scores are half as wide, and the quotient's rounded copy takes up the other half.
    """
    rows = batch_size * context_length
    operand = dtype_bytes(dtype) * rows * d_head
    scores = FLOAT32_BYTES * rows * context_length
    if _FORWARDS[pass_] == 1:  # refuses what is no pass
        alive = {"scores": scores, "exponentials": scores, "their quotient": scores}
    else:
        alive = {
            "output, its gradient, gradient of v": 3 * operand,
            "exponentials": scores,
            "gradient of the weights": scores,
            "temporaries of the division's derivative": 4 * scores,
        }
    small = {"row sums": FLOAT32_BYTES * rows, "causal mask": is_causal * context_length**2}
    return {"q, k, v": 3 * operand} | alive | small


def flash_flops(
    sequences: int, context_length: int, d_head: int, pass_: str = "forward", is_causal: bool = True
) -> int:
    """Operations in the matmuls: 2 d a score and matmul, two matmuls forward and five backward.

    Backward computes S = Q K^T again, then dP, dV, dK and dQ (Dao 2023, algorithm 2).
    """
    return _MATMULS[pass_] * 2 * d_head * flash_scores(sequences, context_length, is_causal)


def flash_scores(sequences: int, context_length: int, is_causal: bool = True) -> int:
    """Scores not masked away, T (T + 1) / 2 a sequence if causal: exponentials, forward and backward each."""
    scores = context_length * (context_length + 1) // 2 if is_causal else context_length**2
    return sequences * scores


def flash_bytes(
    sequences: int,
    context_length: int,
    d_head: int,
    pass_: str = "forward",
    dtype: str = "bfloat16",
) -> int:
    """Bytes to and from memory if each tensor moves once: q, k, v, o; backward o, dO and three gradients too.

    Each row's logsumexp, in float32, is written forward and read backward.
    """
    logsumexps = 2 if pass_ == "forward_backward" else 1
    row_bytes = _FORWARDS[pass_] * 4 * dtype_bytes(dtype) * d_head + logsumexps * FLOAT32_BYTES
    return sequences * context_length * row_bytes
