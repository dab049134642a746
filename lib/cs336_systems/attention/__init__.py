"""Attention behind one front door: every implementation computes the same function of (q, k, v)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from .reference import reference_attention

__all__ = ["IMPLEMENTATIONS", "attention"]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": reference_attention,
    "sdpa": _sdpa,
}


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, implementation: str = "auto") -> Tensor:
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
    """
    if implementation == "auto":
        implementation = "sdpa"
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(["auto", *IMPLEMENTATIONS])
        raise ValueError(f"attention implementation {implementation!r} is unknown; allowed: {allowed}")
    return IMPLEMENTATIONS[implementation](q, k, v, is_causal)
