"""PyTorch's own attentions, measured beside ours: torch.softmax, SDPA's backends, FlexAttention, compiled."""

import math
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.attention.plain import causal_mask, plain_attention


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, by whichever of its backends is switched on.

    Raises:
        ValueError: shapes that do not fit, or q is a vector; PyTorch does not refuse all of them on a CPU.
    """
    leading = {x.shape[:-2] for x in (q, k, v)}
    has_as_many_values = k.shape[-2:-1] == v.shape[-2:-1]
    # Up to four dimensions PyTorch broadcasts the leading ones; more are folded into one here.
    is_foldable = q.dim() <= 4 or len(leading) == 1
    if q.dim() < 2 or not has_as_many_values or not is_foldable:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v have shapes {shapes}; "
            "allowed: (..., n_queries, d), (..., n_keys, d) and (..., n_keys, d_value)"
        )
    heads = (_as_bhnd(x) for x in (q, k, v))
    output = F.scaled_dot_product_attention(*heads, is_causal=is_causal)
    d_value = v.shape[-1]
    return output.reshape(*q.shape[:-1], d_value)


def torch_softmax(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """The formula with PyTorch's softmax: one kernel, in the dtype of the inputs, where `plain_attention` has
    several, in float32. So most code that is called naive computes it."""
    root_d = math.sqrt(q.shape[-1])
    scores = q @ k.transpose(-2, -1) / root_d
    if is_causal:
        visible = causal_mask(q.shape[-2], k.shape[-2], scores.device)
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, -1) @ v


def flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """FlexAttention, compiled: PyTorch's generator of Triton attention kernels."""
    # Imported here: it takes a second, and brings the compiler along.
    from torch.nn.attention.flex_attention import flex_attention

    mask = None
    if is_causal:
        mask = _block_mask(q.shape[-2], k.shape[-2], str(q.device))
    attend = _compiled(flex_attention)
    heads = (_as_bhnd(x) for x in (q, k, v))
    output = attend(*heads, block_mask=mask)
    return output.reshape(q.shape)


@cache
def _block_mask(n_queries: int, n_keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def is_visible(batch, head, query, key):
        return query >= key

    return create_block_mask(is_visible, None, None, n_queries, n_keys, device=device)


def compiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """torch.compile of `plain_attention`."""
    # Inductor reads a lazily negated view without its sign.
    inputs = [x.resolve_neg() for x in (q, k, v)]
    return _compiled(plain_attention)(*inputs, is_causal)


# A function for each shape: kernels for any shape would be slower, and are not what is compared.
_compiled = cache(partial(torch.compile, dynamic=False))


def _as_bhnd(x: Tensor) -> Tensor:
    # Only tensors of four dimensions reach PyTorch's fused kernels; for others it materialises the scores.
    if x.dim() == 4:
        return x
    heads = math.prod(x.shape[:-2])
    return x.reshape(1, heads, *x.shape[-2:])
