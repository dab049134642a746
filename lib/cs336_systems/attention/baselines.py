"""PyTorch's own attentions, measured beside ours: torch.softmax, SDPA's backends, FlexAttention, compiled."""

import math
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.attention.plain import causal_mask, plain_attention


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """PyTorch's scaled_dot_product_attention, by whichever of its backends is switched on.

    Raises:
        ValueError: shapes that do not fit, or q is a vector; PyTorch does not refuse all of them on a CPU.
    """
    leading = {x.shape[:-2] for x in (q, k, v)}
    if q.dim() < 2 or k.shape[-2:-1] != v.shape[-2:-1] or (q.dim() > 4 and len(leading) > 1):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v have shapes {shapes}; "
            "allowed: (..., n_queries, d), (..., n_keys, d) and (..., n_keys, d_value)"
        )
    output = F.scaled_dot_product_attention(
        _as_bhnd(q), _as_bhnd(k), _as_bhnd(v), is_causal=is_causal
    )
    return output.reshape(*q.shape[:-1], v.shape[-1])


def torch_softmax(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """The formula with PyTorch's softmax: one kernel, in the dtype of the inputs, where `plain_attention` has
    several, in float32. So most code that is called naive computes it."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(
            ~causal_mask(*scores.shape[-2:], device=scores.device), -math.inf
        )
    return torch.softmax(scores, -1) @ v


def flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """FlexAttention, compiled: PyTorch's generator of Triton attention kernels."""
    mask = _block_mask(q.shape[-2], k.shape[-2], str(q.device)) if is_causal else None
    from torch.nn.attention.flex_attention import flex_attention

    attend = _compiled(flex_attention)
    return attend(_as_bhnd(q), _as_bhnd(k), _as_bhnd(v), block_mask=mask).reshape(q.shape)


@cache
def _block_mask(n_queries: int, n_keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        lambda b, h, i, j: i >= j, None, None, n_queries, n_keys, device=device
    )


def compiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """torch.compile of `plain_attention`."""
    return _compiled(plain_attention)(q, k, v, is_causal)


_compiled = cache(partial(torch.compile, dynamic=False))


def _as_bhnd(x: Tensor) -> Tensor:
    # Only tensors of four dimensions reach PyTorch's fused kernels; for others it materialises the scores.
    return x if x.dim() == 4 else x.reshape(1, math.prod(x.shape[:-2]), *x.shape[-2:])
