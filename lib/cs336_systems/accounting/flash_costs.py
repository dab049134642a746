"""Attention that never writes its scores down: what it must compute and move, whatever the kernel.

A sequence here is one head of one batch entry. With a causal mask only the T (T + 1) / 2 scores on and below
the diagonal count.
"""

from cs336_systems.accounting.arguments import (
    FLOAT32_BYTES,
    check_attention_pass,
    check_positive_integers,
    dtype_bytes,
)

_MATMULS = {"forward": 2, "backward": 5, "forward_backward": 7}
_TENSORS = {"forward": 4, "backward": 8, "forward_backward": 12}


def flash_flops(
    sequences: int, context_length: int, d_head: int, pass_: str = "forward", is_causal: bool = True
) -> int:
    """Operations in the matmuls: 2 d a score and matmul, two matmuls forward and five backward.

    Backward computes S = Q K^T again, then dP, dV, dK and dQ (Dao 2023, algorithm 2).

    Raises:
        ValueError: the pass is "train_step": attention has nothing to train.
    """
    _check(sequences, context_length, d_head, pass_)
    return _MATMULS[pass_] * 2 * d_head * flash_scores(sequences, context_length, is_causal)


def flash_scores(sequences: int, context_length: int, is_causal: bool = True) -> int:
    """Scores that are not masked away; each needs one exponential forward and one backward."""
    check_positive_integers(sequences=sequences, context_length=context_length)
    keys = context_length * (context_length + 1) // 2 if is_causal else context_length**2
    return sequences * keys


def flash_bytes(
    sequences: int, context_length: int, d_head: int, pass_: str = "forward", dtype: str = "bfloat16"
) -> int:
    """Bytes to and from memory if each tensor moves once: q, k, v, o; backward o, dO and three gradients too.

    Each row's logsumexp, in float32, is written forward and read backward.
    """
    _check(sequences, context_length, d_head, pass_)
    rows = sequences * context_length
    logsumexps = 2 if pass_ == "forward_backward" else 1
    return rows * (_TENSORS[pass_] * dtype_bytes(dtype) * d_head + logsumexps * FLOAT32_BYTES)


def _check(sequences: int, context_length: int, d_head: int, pass_: str) -> None:
    check_positive_integers(sequences=sequences, context_length=context_length, d_head=d_head)
    check_attention_pass(pass_)
