"""A Transformer block as one autograd function: its backward by hand, so that what it keeps is chosen.

    n1 = rms_norm(x)    q, k, v = n1 Wq^T, n1 Wk^T, n1 Wv^T; q and k turned    o = attention(q, k, v)
    h = x + o Wo^T      n2 = rms_norm(h)    a, b = n2 W1^T, n2 W3^T    c = silu(a) b    y = h + c W2^T

Backward needs all of them. It always finds x, the norms' 1/RMS, and o with its logsumexps, which would cost
the most to make again; n1, n2 and c are made again without a matmul, by kernels that read their sources.
Of the rest, KEEPABLE, the caller says what is kept: what is not costs its matmuls, and its norm, once more.
Residuals are added inside the matmuls before them, and what was made again is freed once it is done with.

Stacked, q and k come of one matmul, and so do a and b, [a b]^T = [W1; W3] n2^T: both are contiguous, and so
are da and db, which take their memory. Then dn2 = [da db] [W1; W3] is one matmul, [dW1; dW3] another.
"""

from collections import namedtuple

import torch
import triton
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from cs336_systems import model
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.inputs import MAX_HEAD_SIZE
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import KERNEL_DTYPES
from cs336_systems.kernels import rms_norm, rotary, swiglu
from cs336_systems.kernels.autograd_guards import first_order_only, needs_dispatcher
from cs336_systems.kernels.runtime import launch_kernel
from cs336_systems.model import TransformerBlock, run_block
from cs336_systems.training.fused import is_as_written, use_fused_kernels

KEEPABLE = ("qkv", "h", "ab")
Weights = namedtuple(
    "Weights", "ln1 q k v o ln2 w1 w2 w3"
)  # of a block; each matrix is (d_out, d_in)


def weights(block: TransformerBlock) -> Weights:
    attn, ffn = block.attn, block.ffn
    projections = attn.q_proj, attn.k_proj, attn.v_proj, attn.output_proj
    return Weights(
        *(part.weight for part in (block.ln1, *projections, block.ln2, ffn.w1, ffn.w2, ffn.w3))
    )


class BlockFunction(torch.autograd.Function):
    """`apply(x, cos, sin, num_heads, eps1, eps2, keep, stacked, *Weights)`; x and the result (b, s, d_model).

    cos and sin have as many rows as x has positions.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, cos, sin, num_heads: int, eps1, eps2, keep, stacked: bool, *given
    ) -> Tensor:
        w = Weights(*given)
        with torch.enable_grad():  # first_order_only has to find x behind them
            rows = x.reshape(-1, x.shape[-1])
        ctx.shape, ctx.eps, ctx.stacked = (*x.shape[:-1], num_heads, -1), (eps1, eps2), stacked
        n1, r1 = rms_norm.forward(rows, w.ln1, eps1)
        q, k, v = _qkv(n1, w, cos, sin, ctx.shape, stacked)
        del n1
        o, logsumexp, *rest = flash_forward(q, k, v, True)
        h = torch.addmm(rows, _rows(o), w.o.T)
        n2, r2 = rms_norm.forward(h, w.ln2, eps2)
        a, b = _ab(n2, w, stacked)
        c = swiglu.forward(a, b)
        qkv = (q, k, v) if "qkv" in keep else (None, None, None)
        ab = (a, b) if "ab" in keep else (None, None)
        made = o, logsumexp, r1, r2, *qkv, h if "h" in keep else None, *ab
        ctx.save_for_backward(rows, *made, cos, sin, *w, *rest)
        add = Tensor.addmm_ if stacked and "h" not in keep else torch.addmm
        return add(h, c.T if stacked else c, w.w2.T).view(x.shape)

    @staticmethod
    @first_order_only
    def backward(ctx, dy: Tensor):
        x, o, logsumexp, r1, r2, q, k, v, h, a, b, cos, sin, *given = ctx.saved_tensors
        count = len(Weights._fields)
        w, rest, dy = Weights(*given[:count]), given[count:], dy.reshape(x.shape)

        if h is None:
            h = torch.addmm(x, _rows(o), w.o.T)
        if a is None:
            a, b = _ab(rms_norm.forward(h, w.ln2, ctx.eps[1])[0], w, ctx.stacked)
        elif (
            ctx.stacked and torch._C._autograd._get_current_graph_task_keep_graph()
        ):  # they are needed again
            a, b = torch.stack((a, b))
        if ctx.stacked:
            dn2, da, db, d_w2 = _feed_forward_backward(dy, a, b, w)
            del a, b
        else:
            da, db, c = swiglu.backward(dy @ w.w2, a, b, True)
            del a, b
            d_w2 = dy.T @ c
            del c
            dn2 = (da @ w.w1).addmm_(db, w.w3)
        dh, d_ln2, n2 = rms_norm.backward(dn2, h, w.ln2, r2, dy, True)
        del h, dn2
        d_w1, d_w3 = (_stack(da, db) @ n2).chunk(2) if ctx.stacked else (da.T @ n2, db.T @ n2)
        del da, db, n2

        d_o = dh.T @ _rows(o)
        if q is None:
            q, k, v = _qkv(
                rms_norm.forward(x, w.ln1, ctx.eps[0])[0], w, cos, sin, ctx.shape, ctx.stacked
            )
        dq, dk, dv = flash_backward(_heads(dh @ w.o, ctx.shape), q, k, v, o, logsumexp, True, *rest)
        del q, k, v
        dq, dk = (rotary.rotate(turned, cos, sin, True) for turned in (dq, dk))
        dq, dk, dv = _rows(dq), _rows(dk), _rows(dv)
        dn1 = (dq @ w.q).addmm_(dk, w.k).addmm_(dv, w.v)
        dx, d_ln1, n1 = rms_norm.backward(dn1, x, w.ln1, r1, dh, True)
        d_q, d_k, d_v = dq.T @ n1, dk.T @ n1, dv.T @ n1
        gradients = Weights(d_ln1, d_q, d_k, d_v, d_o, d_ln2, d_w1, d_w2, d_w3)
        return dx.view(*ctx.shape[:2], -1), *[None] * 7, *gradients


def _qkv(
    n1: Tensor, w: Weights, cos: Tensor, sin: Tensor, shape: tuple, stacked: bool
) -> tuple[Tensor, ...]:
    if stacked:
        both = _heads(n1 @ _stack(w.q, w.k).T, (*shape[:-2], 2 * shape[-2], -1))
        return *rotary.rotate(both, cos, sin, False).chunk(2, 1), _heads(n1 @ w.v.T, shape)
    q, k, v = (_heads(n1 @ weight.T, shape) for weight in (w.q, w.k, w.v))
    return *(rotary.rotate(each, cos, sin, False) for each in (q, k)), v


def _ab(n2: Tensor, w: Weights, stacked: bool) -> tuple[Tensor, ...]:
    """a and b, each (b s, d_ff), or stacked (d_ff, b s)."""
    return (_stack(w.w1, w.w3) @ n2.T).chunk(2) if stacked else (n2 @ w.w1.T, n2 @ w.w3.T)


def _feed_forward_backward(dy: Tensor, a: Tensor, b: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """dn2, da, db and the gradient of w2, of a and b stacked, which become da and db."""
    c, ab = w.w2.T @ dy.T, _stack(a, b)  # c is dc until the kernel has written it
    both = ab.chunk(2)
    grid, options = (triton.cdiv(c.numel(), swiglu.BLOCK),), {"BLOCK": swiglu.BLOCK, "WITH_C": True}
    launch_kernel(swiglu.swiglu_backward_kernel, grid, c, *both, *both, c, c.numel(), **options)
    return ab.T @ _stack(w.w1, w.w3), *both, dy.T @ c.T


def _stack(one: Tensor, other: Tensor) -> Tensor:
    """One above the other; a view where their rows lie so in memory, as FSDP gathers them, else a copy."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    if (
        same
        and one.data_ptr() + one.nbytes == other.data_ptr()
        and one.stride(1) == other.stride(1) == 1
    ):
        return one.as_strided((2 * len(one), one.shape[1]), one.stride())
    return torch.cat((one, other))


def _heads(rows: Tensor, shape: tuple) -> Tensor:
    """(b s, h d_head) -> (b, h, s, d_head), a view; shape is (b, s, h, -1)."""
    return rows.view(shape).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """(b, h, s, d_head) -> (b s, h d_head); a view, as all of them lie in memory by position."""
    return heads.transpose(1, 2).flatten(0, 1).flatten(1)


# In the order of block.modules(), after the block itself.
_ATTENTION = model.RMSNorm, model.CausalSelfAttention, model.RotaryEmbedding, *[model.Linear] * 4
_PARTS = *_ATTENTION, model.RMSNorm, model.SwiGLU, *[model.Linear] * 3


def use_fused_blocks(lm: model.TransformerLM, stacked: bool = False) -> model.TransformerLM:
    """`use_fused_kernels(lm)`, and a backward by hand in its blocks.

    stacked: as above; W3 is then before W2 in the order of parameters: FSDP gathers it next to W1.
    """
    for layer in use_fused_kernels(lm).layers:
        if getattr(layer, "run", None) is run_block:
            layer.run = run_fused
            layer.stacked = stacked
            if stacked and type(layer.ffn) is model.SwiGLU:
                layer.ffn._modules["w2"] = layer.ffn._modules.pop("w2")
    return lm


def run_fused(block: TransformerBlock, x: Tensor) -> Tensor:
    """`model.run_block` through BlockFunction, or as it is where that would compute something else.

    That is so for modules that are not as `model` wrote them (adapters, hooks, parametrizations), dtypes that
    differ, in autocast, and under torch.compile or FakeTensorMode. block.keep: some of KEEPABLE.
    """
    if not _is_as_written(block, x):
        return run_block(block, x)
    options = (
        block.attn.num_heads,
        block.ln1.eps,
        block.ln2.eps,
        getattr(block, "keep", ()),
        block.stacked,
    )
    return BlockFunction.apply(
        x.contiguous(), *block.attn.rope.tables(x), *options, *weights(block)
    )


def _is_as_written(block: TransformerBlock, x: Tensor) -> bool:
    if needs_dispatcher(x, *block.parameters()) or torch.is_autocast_enabled(x.device.type):
        return False
    parts = [*block.modules()][1:]
    if (
        len(parts) != len(_PARTS)
        or not all(map(is_as_written, parts, _PARTS))
        or _has_any_global_hook()
    ):
        return False
    functions = block.ln1.norm, block.ln2.norm, block.attn.rope.rotate, block.ffn.gate
    w = weights(block)
    return (
        functions == (rms_norm.rms_norm, rms_norm.rms_norm, rotary.rotary, swiglu.swiglu)
        and x.dim() == 3
        and x.numel() > 0
        and len(w.ln1) <= block.attn.num_heads * MAX_HEAD_SIZE
        and {x.dtype, w.ln1.dtype, w.ln2.dtype}.issubset(KERNEL_DTYPES)
        and {each.dtype for each in w if each.dim() == 2} == {x.dtype}
        and {each.device for each in w} == {x.device}
    )


def kept_bytes(config: ModelConfig, tokens: int, element_bytes: int) -> dict[str, int]:
    """Of one block: "always" (its input, o, the logsumexps, the norms' 1/RMS), and each of KEEPABLE."""
    wide, widest = tokens * config.d_model * element_bytes, tokens * config.d_ff * element_bytes
    logsumexps = (
        4 * tokens * config.num_heads * (2 if element_bytes == 4 else 1)
    )  # with their rests
    return {
        "always": 2 * wide + logsumexps + 2 * 4 * tokens,
        "qkv": 3 * wide,
        "h": wide,
        "ab": 2 * widest,
    }
