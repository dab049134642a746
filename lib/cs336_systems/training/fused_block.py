"""A Transformer block as one autograd function: its backward by hand, so that what it keeps is chosen.

    n1 = rms_norm(x)    q, k, v = n1 Wq^T, n1 Wk^T, n1 Wv^T; q and k turned    o = attention(q, k, v)
    h = x + o Wo^T      n2 = rms_norm(h)    a, b = n2 W1^T, n2 W3^T    c = silu(a) b    y = h + c W2^T

Backward needs all of them. It always finds x, and o with its logsumexps, which would cost the most to make
again; n1, n2 and c it always makes again, from what is there and without a matmul. Of the rest, KEEPABLE, the
caller says what is kept: what is not costs its matmuls once more. Residuals are added inside the matmuls
before them, and what was made again is freed as soon as it is done with.
"""

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from cs336_systems import model
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import KERNEL_DTYPES
from cs336_systems.kernels import rms_norm, rotary, swiglu
from cs336_systems.kernels.autograd_guards import first_order_only, needs_dispatcher
from cs336_systems.model import TransformerBlock, run_block
from cs336_systems.training.fused import is_as_written, use_fused_blocks

__all__ = ["KEEPABLE", "BlockFunction", "kept_bytes", "recomputation", "run_fused", "use_fused_blocks"]
KEEPABLE = ("qkv", "h", "ab")
# Of a block, in the order of its modules; each matrix is (d_out, d_in).
Weights = namedtuple("Weights", "ln1 q k v o ln2 w1 w2 w3")


def weights(block: TransformerBlock) -> Weights:
    return Weights(*(part.weight for part in block.modules() if hasattr(part, "weight")))


class BlockFunction(torch.autograd.Function):
    """`apply(x, cos, sin, num_heads, eps1, eps2, keep, *Weights)`; x and the result are (b, s, d_model).

    cos and sin have as many rows as x has positions.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos, sin, num_heads: int, eps1: float, eps2: float, keep, *given) -> Tensor:
        w = Weights(*given)
        with torch.enable_grad():  # first_order_only has to find x behind them
            rows = x.reshape(-1, x.shape[-1])
        ctx.shape, ctx.eps = (*x.shape[:-1], num_heads, -1), (eps1, eps2)
        q, k, v = _qkv(rms_norm.forward(rows, w.ln1, eps1)[0], w, cos, sin, ctx.shape)
        o, logsumexp, *rest = flash_forward(q, k, v, True)
        h = torch.addmm(rows, _rows(o), w.o.T)
        n2, _ = rms_norm.forward(h, w.ln2, eps2)
        a, b = n2 @ w.w1.T, n2 @ w.w3.T
        c = swiglu.forward(a, b)
        qkv = (q, k, v) if "qkv" in keep else (None, None, None)
        ab = (a, b) if "ab" in keep else (None, None)
        ctx.save_for_backward(rows, o, logsumexp, *qkv, h if "h" in keep else None, *ab, cos, sin, *w, *rest)
        return torch.addmm(h, c, w.w2.T).view(x.shape)

    @staticmethod
    @first_order_only
    def backward(ctx, dy: Tensor):
        x, o, logsumexp, q, k, v, h, a, b, cos, sin, *given = ctx.saved_tensors
        count = len(Weights._fields)
        w, rest, dy = Weights(*given[:count]), given[count:], dy.reshape(x.shape)

        if h is None:
            h = torch.addmm(x, _rows(o), w.o.T)
        n2, r2 = rms_norm.forward(h, w.ln2, ctx.eps[1])
        if a is None:
            a, b = n2 @ w.w1.T, n2 @ w.w3.T
        da, db, c = swiglu.backward(dy @ w.w2, a, b, True)
        del a, b
        d_w2 = dy.T @ c
        del c
        d_w1, d_w3 = da.T @ n2, db.T @ n2
        dn2 = (da @ w.w1).addmm_(db, w.w3)
        del n2, da, db
        dh, d_ln2 = rms_norm.backward(dn2, h, w.ln2, r2, dy)
        del h, dn2

        d_o = dh.T @ _rows(o)
        n1, r1 = rms_norm.forward(x, w.ln1, ctx.eps[0])
        if q is None:
            q, k, v = _qkv(n1, w, cos, sin, ctx.shape)
        dq, dk, dv = flash_backward(_heads(dh @ w.o, ctx.shape), q, k, v, o, logsumexp, True, *rest)
        del q, k, v
        dq, dk = (rotary.rotate(turned, cos, sin, True) for turned in (dq, dk))
        dq, dk, dv = _rows(dq), _rows(dk), _rows(dv)
        d_q, d_k, d_v = dq.T @ n1, dk.T @ n1, dv.T @ n1
        dn1 = (dq @ w.q).addmm_(dk, w.k).addmm_(dv, w.v)
        dx, d_ln1 = rms_norm.backward(dn1, x, w.ln1, r1, dh)
        gradients = Weights(d_ln1, d_q, d_k, d_v, d_o, d_ln2, d_w1, d_w2, d_w3)
        return dx.view(*ctx.shape[:2], -1), *[None] * 6, *gradients


def _qkv(n1: Tensor, w: Weights, cos: Tensor, sin: Tensor, shape: tuple) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_heads(n1 @ weight.T, shape) for weight in (w.q, w.k, w.v))
    return *(rotary.rotate(each, cos, sin, False) for each in (q, k)), v


def _heads(rows: Tensor, shape: tuple) -> Tensor:
    """(b s, h d_head) -> (b, h, s, d_head), a view; shape is (b, s, h, -1)."""
    return rows.view(shape).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """(b, h, s, d_head) -> (b s, h d_head); a view, as all of them lie in memory by position."""
    return heads.transpose(1, 2).flatten(0, 1).flatten(1)


# In the order of block.modules(), after the block itself.
_ATTENTION = model.RMSNorm, model.CausalSelfAttention, model.RotaryEmbedding, *[model.Linear] * 4
_PARTS = *_ATTENTION, model.RMSNorm, model.SwiGLU, *[model.Linear] * 3


def run_fused(block: TransformerBlock, x: Tensor) -> Tensor:
    """`model.run_block` through BlockFunction, or as it is where that would compute something else.

    That is so for modules that are not as `model` wrote them (adapters, hooks, parametrizations), dtypes that
    differ, in autocast, and under torch.compile or FakeTensorMode. block.keep: some of KEEPABLE.
    """
    if not _is_as_written(block, x):
        return run_block(block, x)
    options = block.attn.num_heads, block.ln1.eps, block.ln2.eps, getattr(block, "keep", ())
    return BlockFunction.apply(x.contiguous(), *block.attn.rope.tables(x), *options, *weights(block))


def _is_as_written(block: TransformerBlock, x: Tensor) -> bool:
    if needs_dispatcher(x, *block.parameters()) or torch.is_autocast_enabled(x.device.type):
        return False
    parts = [*block.modules()][1:]
    if len(parts) != len(_PARTS) or not all(map(is_as_written, parts, _PARTS)) or _has_any_global_hook():
        return False
    functions = block.ln1.norm, block.ln2.norm, block.attn.rope.rotate, block.ffn.gate
    w = weights(block)
    return (
        functions == (rms_norm.rms_norm, rms_norm.rms_norm, rotary.rotary, swiglu.swiglu)
        and x.dim() == 3
        and x.numel() > 0
        and {x.dtype, w.ln1.dtype, w.ln2.dtype}.issubset(KERNEL_DTYPES)
        and {each.dtype for each in w if each.dim() == 2} == {x.dtype}
        and {each.device for each in w} == {x.device}
    )


def kept_bytes(config: ModelConfig, tokens: int, element_bytes: int) -> dict[str, int]:
    """Of one block: "always" (its input, o, the logsumexps), and each of KEEPABLE."""
    wide, widest = tokens * config.d_model * element_bytes, tokens * config.d_ff * element_bytes
    logsumexps = 4 * tokens * config.num_heads * (2 if element_bytes == 4 else 1)  # with their rests
    return {"always": 2 * wide + logsumexps, "qkv": 3 * wide, "h": wide, "ab": 2 * widest}


def recomputation(block: TransformerBlock, x: Tensor) -> dict[str, Callable[[], Any]]:
    """For each of KEEPABLE what backward does if it is not kept; with x (b, s, d_model) for every input."""
    w, rows, shape = weights(block), x.reshape(-1, x.shape[-1]), (*x.shape[:-1], block.attn.num_heads, -1)
    tables = (table[: x.shape[-2]] for table in (block.attn.rope.cos, block.attn.rope.sin))
    return {
        "qkv": partial(_qkv, rows, w, *tables, shape),
        "h": lambda: torch.addmm(rows, rows, w.o.T),
        "ab": lambda: (rows @ w.w1.T, rows @ w.w3.T),
    }
