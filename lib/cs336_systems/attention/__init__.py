"""Attention: every implementation computes the same function of (q, k, v); `attention` calls any of them."""

from torch import Tensor

from cs336_systems.arguments import check_choice
from cs336_systems.attention.tiles import select_tuning
from cs336_systems.attention.flash_pytorch import FlashAttentionPyTorch
from cs336_systems.attention.implementations import (
    ATTENTION,
    ATTENTION_PASSES,
    MODEL_ATTENTION,
    OURS,
    sdpa_backend,
    why_not,
)
from cs336_systems.attention.inputs import MAX_HEAD_SIZE, check_tensors
from cs336_systems.attention.plain import plain_attention
from cs336_systems.dtypes import KERNEL_DTYPES
from cs336_systems.kernels import HAS_TRITON
from cs336_systems.nvtx import annotate

if HAS_TRITON:
    from cs336_systems.attention.flash_triton import FlashAttentionTriton


def attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, implementation: str = "auto"
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, row by row.

    Args:
        q: (..., n_queries, d); at most four dimensions, of "plain" and "sdpa" any number.
        k, v: (..., n_keys, d).
        is_causal: query i sees key j only if j <= i (aligned at the first position, also when
            n_queries != n_keys).
        implementation: one of MODEL_ATTENTION; "auto" is our kernels, or "sdpa" where they cannot run.

    Returns:
        (..., n_queries, d), in q's dtype.

    Raises:
        ValueError: the implementation's name is unknown; the message lists the names.
        ImportError: the implementation needs triton, which is not installed.
        TypeError: q, k and v are not all tensors.
    """
    check_tensors(q, k, v)
    if implementation == "auto":
        implementation = _fastest(q, k)
    entry = ATTENTION.get(implementation)
    if entry is None or not entry.in_model:
        # It raises, with the names.
        check_choice("attention implementation", implementation, MODEL_ATTENTION)
    with annotate("attention"):
        return entry.function(q, k, v, is_causal)


def _fastest(q: Tensor, k: Tensor) -> str:
    kernels = HAS_TRITON and q.is_cuda and q.dtype in KERNEL_DTYPES
    fits = len(q.shape) <= 4 and q.shape[-1] <= MAX_HEAD_SIZE
    empty = 0 in q.shape or 0 in k.shape
    return OURS if kernels and fits and not empty else "sdpa"
