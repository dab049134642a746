"""A Transformer block as one autograd function: its backward by hand, so that what it keeps is chosen.

    n1 = rms_norm(x)    q, k, v = n1 Wq^T, n1 Wk^T, n1 Wv^T; q and k turned    o = attention(q, k, v)
    h = x + o Wo^T      n2 = rms_norm(h)    a, b = n2 W1^T, n2 W3^T    c = silu(a) b    y = h + c W2^T

Backward needs all of them. It always finds x, the norms' 1/RMS, and o with its logsumexps, which would cost
the most to make again; n1, n2 and c are made again without a matmul, by kernels that read their sources.
Of the rest, KEEPABLE, the caller says what is kept: what is not costs its matmuls, and its norm, once more.
Residuals are added inside the matmuls before them, and what was made again is freed once it is done with.

q and k come of one matmul, and so do a and b, [a b]^T = [W1; W3] n2^T: both are contiguous, and so are da and
db, which take their memory. Then dn2 = [da db] [W1; W3] is one matmul, [dW1; dW3] another.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from cs336_systems import model
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.inputs import MAX_HEAD_SIZE
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import KERNEL_DTYPES
from cs336_systems.kernels import rms_norm, rotary, swiglu
from cs336_systems.kernels.autograd_guards import first_order_only, needs_dispatcher
from cs336_systems.model import TransformerBlock, run_block
from cs336_systems.training.fused import is_as_written, use_fused_kernels

KEEPABLE = ("qkv", "h", "ab")


class Weights(NamedTuple):
    """Of a block, in the order of its parameters; each matrix is (d_out, d_in)."""

    ln1: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    ln2: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor


class BlockFunction(torch.autograd.Function):
    """`apply(x, cos, sin, num_heads, eps1, eps2, keep, *Weights)`; x and the result are (b, s, d_model).

    cos and sin have as many rows as x has positions.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        eps1: float,
        eps2: float,
        keep: Collection[str],
        *matrices: Tensor,
    ) -> Tensor:
        w = Weights(*matrices)
        # With gradients: first_order_only has to find x behind the rows that are saved.
        with torch.enable_grad():
            rows = x.reshape(-1, x.shape[-1])
        ctx.shape = tuple(x.shape[:-1]) + (num_heads, -1)
        ctx.eps1 = eps1
        ctx.eps2 = eps2

        n1, r1 = rms_norm.forward(rows, w.ln1, eps1)
        q, k, v = _qkv(n1, w, cos, sin, ctx.shape)
        del n1
        # residual: what L lost when it was rounded, of float32 alone; not the stream that a block adds to.
        o, logsumexp, *residual = flash_forward(q, k, v, True)
        h = torch.addmm(rows, _rows(o), w.o.T)

        n2, r2 = rms_norm.forward(h, w.ln2, eps2)
        a, b = _ab(n2, w)
        c = swiglu.forward(a, b)

        # `backward` takes them by position: x, o, logsumexp, r1, r2, q, k, v, h, a, b (None where not kept),
        # cos, sin, the matrices in the order of Weights, and the residual where there is one.
        always = (rows, o, logsumexp, r1, r2)
        kept_qkv = (q, k, v) if "qkv" in keep else (None, None, None)
        kept_h = h if "h" in keep else None
        kept_ab = (a, b) if "ab" in keep else (None, None)
        ctx.save_for_backward(*always, *kept_qkv, kept_h, *kept_ab, cos, sin, *w, *residual)
        # y takes the memory of h where nobody reads it again.
        add = Tensor.addmm_ if kept_h is None else torch.addmm
        y = add(h, c.T, w.w2.T)
        return y.view(x.shape)

    @staticmethod
    @first_order_only
    def backward(ctx, dy: Tensor):
        x, o, logsumexp, r1, r2, q, k, v, h, a, b, cos, sin, *others = ctx.saved_tensors
        count = len(Weights._fields)
        w = Weights(*others[:count])
        residual = others[count:]
        dy = dy.reshape(x.shape)

        if h is None:
            h = torch.addmm(x, _rows(o), w.o.T)
        if a is None:
            n2 = rms_norm.forward(h, w.ln2, ctx.eps2)[0]
            a, b = _ab(n2, w)
            del n2
        elif torch._C._autograd._get_current_graph_task_keep_graph():
            # Their gradients would overwrite them, and another backward needs them.
            a, b = torch.stack((a, b))
        dn2, da, db, d_w2 = _feed_forward_backward(dy, a, b, w)
        del a, b
        # One kernel: back through the norm, dy added, which went past it, and n2 made again.
        dh, d_ln2, n2 = rms_norm.backward(dn2, h, w.ln2, r2, dy)
        del h, dn2
        d_w13 = _stack(da, db) @ n2
        d_w1, d_w3 = d_w13.chunk(2)
        # The attention half makes as much again; it may have this memory.
        del da, db, n2

        d_wo = dh.T @ _rows(o)
        if q is None:
            n1 = rms_norm.forward(x, w.ln1, ctx.eps1)[0]
            q, k, v = _qkv(n1, w, cos, sin, ctx.shape)
            del n1
        d_heads = _heads(dh @ w.o, ctx.shape)
        dq, dk, dv = flash_backward(d_heads, q, k, v, o, logsumexp, True, *residual)
        del q, k, v, d_heads
        # The transposed rotation is the inverse one.
        dq = _rows(rotary.rotate(dq, cos, sin, True))
        dk = _rows(rotary.rotate(dk, cos, sin, True))
        dv = _rows(dv)
        # Summed inside the matmuls: no sum reads and writes dn1 once more.
        dn1 = dq @ w.q
        dn1.addmm_(dk, w.k)
        dn1.addmm_(dv, w.v)
        dx, d_ln1, n1 = rms_norm.backward(dn1, x, w.ln1, r1, dh)
        d_wq = dq.T @ n1
        d_wk = dk.T @ n1
        d_wv = dv.T @ n1
        gradients = Weights(d_ln1, d_wq, d_wk, d_wv, d_wo, d_ln2, d_w1, d_w2, d_w3)
        dx = dx.view(*ctx.shape[:2], -1)
        return (dx,) + 6 * (None,) + gradients


def _qkv(
    n1: Tensor,
    w: Weights,
    cos: Tensor,
    sin: Tensor,
    shape: tuple,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned, and v, each (b, h, s, d_head); shape is (b, s, h, -1)."""
    v = _heads(n1 @ w.v.T, shape)
    batch, positions, heads, _ = shape
    qk = n1 @ _stack(w.q, w.k).T
    qk = _heads(qk, (batch, positions, 2 * heads, -1))
    q, k = rotary.rotate(qk, cos, sin, False).chunk(2, 1)
    return q, k, v


def _ab(n2: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """a and b, each (d_ff, b s)."""
    ab = _stack(w.w1, w.w3) @ n2.T
    return ab.chunk(2)


def _feed_forward_backward(dy: Tensor, a: Tensor, b: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """dn2, da, db and the gradient of w2, of a and b stacked, which become da and db."""
    dc = w.w2.T @ dy.T
    ab = _stack(a, b)
    da, db = ab.chunk(2)
    # In place: at 32,768 tokens each of these is 0.7 GiB. What was dc is c from here on. Where
    # `_stack` gives a view, a and b are overwritten, else its copy is.
    swiglu.launch_backward(dc, da, db, da, db, dc)
    c = dc
    dn2 = ab.T @ _stack(w.w1, w.w3)
    return dn2, da, db, dy.T @ c.T


def _stack(one: Tensor, other: Tensor) -> Tensor:
    """One above the other; a view where their rows lie so in memory, as FSDP gathers them, else a copy."""
    storage = one.untyped_storage().data_ptr()
    # Two tensors may be neighbours by chance; a view must not leave its own memory.
    same_storage = storage == other.untyped_storage().data_ptr()
    end = one.data_ptr() + one.nbytes
    if same_storage and end == other.data_ptr() and one.stride(1) == other.stride(1) == 1:
        shape = (2 * len(one), one.shape[1])
        return one.as_strided(shape, one.stride())
    return torch.cat((one, other))


def _heads(rows: Tensor, shape: tuple) -> Tensor:
    """(b s, h d_head) -> (b, h, s, d_head), a view; shape is (b, s, h, -1)."""
    return rows.view(shape).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """(b, h, s, d_head) -> (b s, h d_head); a view, as all of them lie in memory by position."""
    return heads.transpose(1, 2).flatten(0, 1).flatten(1)


# In the order of block.modules(), after the block itself.
_PARTS = [model.RMSNorm, model.CausalSelfAttention, model.RotaryEmbedding] + 4 * [model.Linear]
_PARTS += [model.RMSNorm, model.SwiGLU] + 3 * [model.Linear]


def use_fused_blocks(lm: model.TransformerLM) -> model.TransformerLM:
    """`use_fused_kernels(lm)`, and a backward by hand in its blocks; FSDP then gathers W3 next to W1.

    Under a mode of PyTorch's, as a counter of operations is, blocks compute as `model` wrote them; a
    checkpointed forward and its backward have to be under the same (see `run_fused`).
    """
    for layer in use_fused_kernels(lm).layers:
        if getattr(layer, "run", None) is run_block:
            layer.run = run_fused
            if type(layer.ffn) is model.SwiGLU:
                layer.ffn.gathered_last = "w2"
    return lm


def run_fused(block: TransformerBlock, x: Tensor) -> Tensor:
    """`model.run_block` through BlockFunction, or as it is where that would compute something else.

    That is so for modules that are not as `model` wrote them (adapters, hooks, parametrizations), dtypes that
    differ, in autocast, and under torch.compile, FakeTensorMode or any other mode. It is decided at each
    call: around a checkpointed forward and its backward the same has to be switched on. block.keep: some of
    KEEPABLE.
    """
    if not _is_as_written(block, x):
        return run_block(block, x)
    tables = block.attn.rope.tables(x)
    keep = getattr(block, "keep", ())
    options = (block.attn.num_heads, block.ln1.eps, block.ln2.eps, keep)
    return BlockFunction.apply(x.contiguous(), *tables, *options, *block.parameters())


def _is_as_written(block: TransformerBlock, x: Tensor) -> bool:
    """Whether BlockFunction computes what the block's modules would, of x."""
    if torch.is_autocast_enabled(x.device.type) or _has_any_global_hook():
        return False
    parameters = list(block.parameters())
    if needs_dispatcher(x, *parameters) or len(parameters) != len(Weights._fields):
        return False
    parts = list(block.modules())[1:]
    if len(parts) != len(_PARTS) or not all(map(is_as_written, parts, _PARTS)):
        return False
    if block.ln1.norm is not rms_norm.rms_norm or block.ln2.norm is not rms_norm.rms_norm:
        return False
    if block.attn.rope.rotate is not rotary.rotary or block.ffn.gate is not swiglu.swiglu:
        return False
    if x.dim() != 3 or not x.numel() or x.shape[-1] > block.attn.num_heads * MAX_HEAD_SIZE:
        return False
    matrix_dtypes = {each.dtype for each in parameters if each.dim() == 2}
    # Norms may be float32: FSDP keeps them so.
    dtypes = {each.dtype for each in parameters}
    return (
        dtypes.issubset(KERNEL_DTYPES)
        and matrix_dtypes == {x.dtype}
        and {each.device for each in parameters} == {x.device}
    )


def kept_bytes(config: ModelConfig, tokens: int, element_bytes: int) -> dict[str, int]:
    """Of one block: "always" (its input, o, the logsumexps, the norms' 1/RMS), and each of KEEPABLE."""
    row = tokens * config.d_model * element_bytes
    gate = tokens * config.d_ff * element_bytes
    inverse_rms = 4 * tokens
    # Of float32 there is what each lost when it was rounded, too.
    logsumexps = 4 * tokens * config.num_heads * (2 if element_bytes == 4 else 1)
    return {
        "always": 2 * row + logsumexps + 2 * inverse_rms,
        "qkv": 3 * row,
        "h": row,
        "ab": 2 * gate,
    }
