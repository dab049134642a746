"""FlashAttention-2 in plain PyTorch (Dao 2023): the same tiles as the kernel, slow and easy to read."""

import math

import torch
from torch import Tensor

from cs336_systems.attention.inputs import check_inputs, in_autocast
from cs336_systems.kernels.autograd_guards import first_order_only

TILE = 128  # queries and keys per tile


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: online softmax over tiles of keys, one tile of queries at a time.

    Args:
        q: (..., n_queries, d); k, v: (..., n_keys, d).

    Returns:
        O (..., n_queries, d) in q's dtype and L = logsumexp(scores) (..., n_queries) in float32, natural log.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    n_queries = q.shape[-2]
    n_keys = k.shape[-2]
    outputs = []
    logsumexps = []
    for first_query in range(0, n_queries, TILE):
        q_tile = q[..., first_query : first_query + TILE, :].float() * scale
        rows = torch.arange(first_query, first_query + q_tile.shape[-2], device=q.device)
        # Running maximum of a row of scores. From -inf, a tile of scores of -inf would make exp(-inf - -inf),
        # NaN.
        m = q_tile.new_full(q_tile.shape[:-1], torch.finfo(torch.float32).min)
        total = torch.zeros_like(m)  # running sum of exp(score - m)
        o = torch.zeros_like(q_tile)  # running sum of exp(score - m) v
        last_key = min(n_keys, first_query + TILE) if is_causal else n_keys
        for first_key in range(0, last_key, TILE):
            keys = slice(first_key, first_key + TILE)
            k_tile = k[..., keys, :].float()
            v_tile = v[..., keys, :].float()
            s = q_tile @ k_tile.mT
            if is_causal:
                columns = torch.arange(first_key, first_key + k_tile.shape[-2], device=q.device)
                s = s.masked_fill(rows[:, None] < columns, -math.inf)
            m_new = torch.maximum(m, s.amax(-1))
            p = torch.exp(s - m_new[..., None])
            correction = torch.exp(m - m_new)
            total = total * correction + p.sum(-1)
            o = o * correction[..., None] + p @ v_tile
            m = m_new
        # Where all scores are -inf O is 0, and L infinite, so that P is 0 in backward.
        empty = total == 0
        o = o / total.masked_fill(empty, 1)[..., None]
        logsumexp = m + torch.log(total)
        # Rounded here, not after `cat`: where to() has nothing to do, torch 2.11 compiles a wrong backward.
        outputs.append(o.to(q.dtype))
        logsumexps.append(logsumexp.masked_fill(empty, math.inf))
    return torch.cat(outputs, -2), torch.cat(logsumexps, -1)


def flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, with P recomputed from the saved logsumexp: the forward kept nothing quadratic.

    Written for torch.compile, in a handful of whole-matrix steps: it holds (n_queries, n_keys) while it runs.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    do32, q32, k32, v32 = [x.float() for x in (do, q, k, v)]
    delta = (do32 * o.float()).sum(-1, keepdim=True)  # = rowsum(dP * P), without P
    s = q32 @ k32.mT * scale
    if is_causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, -math.inf)
    p = torch.exp(s - logsumexp[..., None])
    ds = p * (do32 @ v32.mT - delta) * scale
    dq = ds @ k32
    dk = ds.mT @ q32
    dv = p.mT @ do32
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class FlashAttentionPyTorch(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v, tile by tile: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and one logsumexp per query; float32 inside whatever the inputs' dtype.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = in_autocast(q, k, v)
        check_inputs(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            o, logsumexp = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, logsumexp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @first_order_only
    def backward(ctx, do: Tensor):
        q, k, v, o, logsumexp = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = flash_backward(do, q, k, v, o, logsumexp, ctx.is_causal)
        return dq, dk, dv, None
