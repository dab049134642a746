"""FlashAttention-2 with our own Triton kernels: the launches, the autograd.Function and what torch.compile needs.

float32 tensors multiply exactly by default and in TF32 after torch.set_float32_matmul_precision("high"), PyTorch's own
switch. The result is deterministic, backward included.
"""

import contextlib
import math
import threading
from functools import cache

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from .inputs import cast_for_autocast, check_inputs
from .kernels_backward import dkdv_kernel, dq_kernel
from .kernels_forward import forward_kernel
from .tuning import Tile, tile_for

INTERPRETED = triton.knobs.runtime.interpret
LOG2E = math.log2(math.e)
_thread = threading.local()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return (0, 0) if INTERPRETED else torch.cuda.get_device_capability(device)


def _options(tile: Tile) -> dict:
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return options | ({"maxnreg": tile.maxnreg} if tile.maxnreg else {})


def _precision(dtype: torch.dtype) -> str:
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "tf32x3" if exact else "tf32"


def _four_dims(x: Tensor) -> Tensor:
    """(..., n, d) as (batch, heads, n, d)."""
    return x.flatten(0, -4) if x.dim() > 3 else x[(None,) * (4 - x.dim())]


def _for_copy_engine(x: Tensor) -> Tensor:
    """x itself when the copy engine can read it, otherwise a copy: last stride 1, the others multiples of 16 bytes."""
    unit = 16 // x.element_size()
    readable = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    if readable and all(stride and stride % unit == 0 for stride, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1):
        return x
    rows = x.new_empty((*x.shape[:-1], -(-x.shape[-1] // unit) * unit))
    return rows[..., : x.shape[-1]].copy_(x)


def _descriptor(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Tiles of (rows, block_d) of a (batch, heads, n, d) tensor."""
    strides = [stride if n > 1 else 16 for stride, n in zip(x.stride()[:-1], x.shape, strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, block_d])


def _head_block(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """O (..., n_queries, d) in q's dtype and layout, and L = logsumexp(scores) (..., n_queries) in float32."""
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter multiplies bfloat16's bit patterns
        o, logsumexp = flash_forward(q.float(), k.float(), v.float(), is_causal)
        return o.to(q.dtype), logsumexp
    o = torch.empty_like(q if q.dim() <= 4 else _four_dims(q))
    logsumexp = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    shape = q.shape
    q, k, v, o4 = (_four_dims(x) for x in (q, k, v, o))
    batch, heads, n_queries, d = q.shape
    n_keys = k.shape[2]
    block_d = _head_block(d)
    tile = tile_for("forward", q.element_size(), block_d, _capability(q.device))
    q, k, v = (_for_copy_engine(x) for x in (q, k, v))
    with _on(q.device):
        forward_kernel[(triton.cdiv(n_queries, tile.block_m) * batch * heads,)](
            _descriptor(q, tile.block_m, block_d),
            _descriptor(k, tile.block_n, block_d),
            _descriptor(v, tile.block_n, block_d),
            o4, logsumexp, *o4.stride(), heads, n_queries, n_keys, LOG2E / math.sqrt(d),
            CAUSAL=is_causal, EVEN_KEYS=n_keys % tile.block_n == 0, D=d, BLOCK_D=block_d,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, PRECISION=_precision(q.dtype), **_options(tile),
        )  # fmt: skip
    return o.reshape(shape), logsumexp


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the dtypes and layouts of q, k, v."""
    if INTERPRETED and q.dtype == torch.bfloat16:
        grads = flash_backward(*(x.float() for x in (do, q, k, v, o)), logsumexp, is_causal)
        return tuple(grad.to(q.dtype) for grad in grads)
    shapes = q.shape, k.shape, v.shape
    do, q, k, v, o = (_four_dims(x) for x in (do, q, k, v, o))
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    inputs = tuple(_for_copy_engine(x) for x in (q, k, v, do))
    itemsize, block_d, capability = q.element_size(), _head_block(q.shape[-1]), _capability(q.device)
    lse2, delta = torch.empty((2, *logsumexp.shape), dtype=torch.float32, device=q.device)
    with _on(q.device):
        tile = tile_for("dq", itemsize, block_d, capability)
        _dq(tile, *inputs, o, logsumexp, lse2, delta, is_causal, grads[0])
        tile = tile_for("dkdv", itemsize, block_d, capability)
        _dkdv(tile, *inputs, lse2, delta, is_causal, *grads[1:])
    return tuple(grad.reshape(shape) for grad, shape in zip(grads, shapes, strict=True))


def _dq(tile, q, k, v, do, o, logsumexp, lse2, delta, is_causal, dq) -> None:
    batch, heads, n_queries, d = q.shape
    n_keys = k.shape[2]
    block_d = _head_block(d)
    dq_kernel[(triton.cdiv(n_queries, tile.block_m) * batch * heads,)](
        _descriptor(q, tile.block_m, block_d), _descriptor(k, tile.block_n, block_d),
        _descriptor(v, tile.block_n, block_d), _descriptor(do, tile.block_m, block_d),
        o, logsumexp, lse2, delta, dq, *o.stride(), *dq.stride(),
        heads, n_queries, n_keys, 1 / math.sqrt(d), LOG2E / math.sqrt(d),
        CAUSAL=is_causal, EVEN_KEYS=n_keys % tile.block_n == 0, D=d, BLOCK_D=block_d,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, PRECISION=_precision(q.dtype), **_options(tile),
    )  # fmt: skip


def _dkdv(tile, q, k, v, do, lse2, delta, is_causal, dk, dv) -> None:
    batch, heads, n_queries, d = q.shape
    n_keys = k.shape[2]
    block_d = _head_block(d)
    dkdv_kernel[(triton.cdiv(n_keys, tile.block_n) * batch * heads,)](
        _descriptor(q, tile.block_m, block_d), _descriptor(k, tile.block_n, block_d),
        _descriptor(v, tile.block_n, block_d), _descriptor(do, tile.block_m, block_d),
        lse2, delta, dk, dv, *dk.stride(), *dv.stride(),
        heads, n_queries, n_keys, 1 / math.sqrt(d), LOG2E / math.sqrt(d),
        CAUSAL=is_causal, D=d, BLOCK_D=block_d,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, PRECISION=_precision(q.dtype), **_options(tile),
    )  # fmt: skip


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes the device current. The first time in a thread it also makes its context current, which descriptors

    need: autograd's own threads start without one, and a kernel of PyTorch's brings it.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    if device not in _thread.__dict__.setdefault("devices", set()):
        torch.zeros(1, device=device)
        _thread.devices.add(device)
    return torch.cuda.device(device)


# torch.compile sees the two launches as opaque operators: no graph break, and nothing of Triton's to trace.
_forward_op = torch.library.custom_op("cs336_systems::flash_forward", mutates_args=())(flash_forward)
_backward_op = torch.library.custom_op("cs336_systems::flash_backward", mutates_args=())(flash_backward)


@_forward_op.register_fake
def _(q, k, v, is_causal):
    o = torch.empty_like(q if q.dim() <= 4 else _four_dims(q)).reshape(q.shape)
    return o, q.new_empty(q.shape[:-1], dtype=torch.float32)


@_backward_op.register_fake
def _(do, q, k, v, o, logsumexp, is_causal):
    return tuple(torch.empty_like(_four_dims(x)).reshape(x.shape) for x in (q, k, v))


class FlashAttentionTriton(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v in fused kernels: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and one logsumexp per query: memory linear in the sequence length.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = cast_for_autocast(q, k, v)
        check_inputs(q, k, v)
        run = _forward_op if torch.compiler.is_compiling() else flash_forward
        o, logsumexp = run(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, logsumexp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor):
        run = _backward_op if torch.compiler.is_compiling() else flash_backward
        return *run(do, *ctx.saved_tensors, ctx.is_causal), None
