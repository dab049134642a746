"""Attention as the formula has it, every score in memory: what the faster kernels are measured against."""

import math

import torch
from torch import Tensor

from cs336_systems.functional import softmax
from cs336_systems.nvtx import annotate


def causal_mask(n_queries: int, n_keys: int, device: torch.device | str | None = None) -> Tensor:
    """(n_queries, n_keys) booleans, true where query i may look at key j: j <= i, aligned at the top left."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril()


def plain_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(d)) v (Vaswani et al. 2017, equation 1), one full matrix after the other.

    Args:
        q: (..., n_queries, d).
        k: (..., n_keys, d).
        v: (..., n_keys, d_value).
        is_causal: let query i see only the keys j <= i.

    Returns:
        (..., n_queries, d_value), in the type of the inputs; the softmax is computed in float32 or better.
    """
    with annotate("scores"):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if is_causal:
            # Minus infinity, not a large number: hidden keys weigh exactly nothing.
            visible = causal_mask(q.shape[-2], k.shape[-2], scores.device)
            scores = scores.masked_fill(~visible, -math.inf)
    with annotate("softmax"):
        weights = softmax(scores, dim=-1)
    with annotate("values"):
        return weights @ v
