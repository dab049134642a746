"""Attention behind one front door: every implementation computes the same function of (q, k, v)."""

import math
from collections.abc import Callable
from importlib.util import find_spec

import torch.nn.functional as F
from torch import Tensor

from cs336_systems.attention.flash_pytorch import FlashAttentionPyTorch
from cs336_systems.attention.inputs import DTYPES, MAX_HEAD_SIZE, check_tensors
from cs336_systems.attention.plain import reference_attention
from cs336_systems.nvtx import annotate

HAS_TRITON = find_spec("triton") is not None  # not on macOS
if HAS_TRITON:
    from cs336_systems.attention.flash_triton import FlashAttentionTriton

__all__ = ["IMPLEMENTATIONS", "FlashAttentionPyTorch", "FlashAttentionTriton", "attention"]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    # Only tensors of four dimensions reach torch's fused kernels; for others it materialises the scores.
    with_heads = [
        x if x.dim() == 4 else x.reshape(1, math.prod(x.shape[:-2]), *x.shape[-2:]) for x in (q, k, v)
    ]
    output = F.scaled_dot_product_attention(*with_heads, is_causal=is_causal)
    return output.reshape(*q.shape[:-1], v.shape[-1])


def _flash_pytorch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return FlashAttentionPyTorch.apply(q, k, v, is_causal)


def _flash_triton(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    if not HAS_TRITON:
        raise ImportError("attention implementation 'flash_triton' needs triton, which is not installed here")
    return FlashAttentionTriton.apply(q, k, v, is_causal)


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": reference_attention,
    "sdpa": _sdpa,
    "flash_pytorch": _flash_pytorch,
    "flash_triton": _flash_triton,
}


def _fastest(q: Tensor, k: Tensor) -> str:
    ours = HAS_TRITON and q.is_cuda and q.dtype in DTYPES and q.shape[-1] <= MAX_HEAD_SIZE
    empty = 0 in q.shape or 0 in k.shape
    return "flash_triton" if ours and not empty else "sdpa"


def attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, implementation: str = "auto"
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, row by row.

    Args:
        q: (..., n_queries, d); any number of leading dimensions, none included.
        k, v: (..., n_keys, d).
        is_causal: query i sees key j only if j <= i (aligned at the first position, also when
            n_queries != n_keys).
        implementation: a name in IMPLEMENTATIONS, or "auto": the fastest that can run these tensors.

    Returns:
        (..., n_queries, d), in q's dtype.

    Raises:
        ValueError: the implementation's name is unknown; the message lists the names.
        ImportError: "flash_triton" where triton is not installed.
        TypeError: q, k and v are not all tensors.
    """
    check_tensors(q, k, v)
    if implementation == "auto":
        implementation = _fastest(q, k)
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(["auto", *IMPLEMENTATIONS])
        raise ValueError(f"attention implementation {implementation!r} is unknown; allowed: {allowed}")
    with annotate("attention"):
        return IMPLEMENTATIONS[implementation](q, k, v, is_causal)
