"""FlashAttention-2 with our own Triton kernels: launches, autograd.Function, and what torch.compile needs.

Two switches are PyTorch's own. float32 tensors multiply with all their bits by default, in TF32 after
torch.set_float32_matmul_precision("high") or torch.backends.cuda.matmul.fp32_precision = "tf32". And the
result has the same bits every time, but for dQ on Hopper, which is added up there in the order in which
programs come: so it is deterministic everywhere after torch.use_deterministic_algorithms(True), and slower.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.attention import flash_pytorch
from cs336_systems.attention.inputs import check_that_they_fit, in_autocast
from cs336_systems.attention.launcher import (
    Problem,
    backward_launcher,
    config_for,
    forward_launcher,
    layout,
)
from cs336_systems.kernels.runtime import ALIGNMENT, INTERPRETED, aligned, check_device, device_context

# Launchers by all that they depend on. One look-up is what a call pays; what is found there was checked.
_forwards: dict[tuple, Problem] = {}
_backwards: dict[tuple, Problem] = {}
MAX_LAUNCHERS = 256  # of each


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[Tensor]:
    """O, L and, of float32 with all its bits, rest.

    O (..., n_queries, d) in q's dtype and layout; L = logsumexp(scores) (..., n_queries) in float32; rest
    (..., n_queries, 1), what L lost when it was rounded.
    """
    if q.dim() > 4:
        o, *sums = flash_forward(*(x.flatten(0, -4) for x in (q, k, v)), is_causal)
        return [o.reshape(q.shape), *(x.reshape(*q.shape[:-1], *x.shape[3:]) for x in sums)]
    if INTERPRETED and q.dtype == torch.bfloat16:  # the interpreter multiplies bfloat16's bit patterns
        o, logsumexp, _ = flash_forward(q.float(), k.float(), v.float(), is_causal)
        return [o.to(q.dtype), logsumexp]
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        q, k, v = aligned(q), aligned(k), aligned(v)
    shape, dtype, device = q.shape, q.dtype, q.device
    o = torch.empty_like(q)
    logsumexp = q.new_empty(shape[:-1], dtype=torch.float32)
    tf32 = allows_tf32(dtype)
    rest = [q.new_empty((*shape[:-1], 1))] if keeps_rest(dtype, tf32) else []
    key = (
        shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), dtype, k.dtype, v.dtype,
        device, k.device, v.device, is_causal, tf32,
    )  # fmt: skip
    launch = _forwards.get(key)
    if launch is None:
        check_that_they_fit(q, k, v)
        check_device("q, k, v", q)
        config = config_for(dtype, shape[-1], device, tf32)
        launch = forward_launcher((layout(q), layout(k), layout(v), layout(o)), config, is_causal)
        _keep(_forwards, key, launch)
    with device_context(device):
        launch(q, k, v, o, logsumexp, *(rest or [logsumexp]))
    return [o, logsumexp, *rest]


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor, is_causal: bool,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV in the dtypes and layouts of q, k, v. rest: of `flash_forward`, if it made one."""
    if q.dim() > 4:
        grads = flash_backward(*(x.flatten(0, -4) for x in (do, q, k, v, o)), logsumexp, is_causal, rest)
        return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    if INTERPRETED and q.dtype == torch.bfloat16:
        grads = flash_backward(*(x.float() for x in (do, q, k, v, o)), logsumexp, is_causal)
        return tuple(grad.to(q.dtype) for grad in grads)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | do.data_ptr() | o.data_ptr()
    shape, dtype, device = q.shape, q.dtype, q.device
    tf32 = allows_tf32(dtype)
    if not keeps_rest(dtype, tf32):
        rest = logsumexp  # any tensor: the kernels do not read it
    elif rest is None:  # PyTorch's switch was moved since
        rest = torch.zeros_like(logsumexp)
    if (addresses | logsumexp.data_ptr() | rest.data_ptr()) % ALIGNMENT:
        q, k, v, do, o, logsumexp, rest = (aligned(x) for x in (q, k, v, do, o, logsumexp, rest))
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = (  # dq, dk and dv have layouts that follow from those of q, k and v
        shape, k.shape, q.stride(), k.stride(), v.stride(), do.stride(), o.stride(), dtype, device,
        is_causal, tf32, deterministic,
    )  # fmt: skip
    launch = _backwards.get(key)
    if launch is None:
        config = config_for(dtype, shape[-1], device, tf32)
        layouts = tuple(layout(x) for x in (q, k, v, do, o, dq, dk, dv))
        launch = backward_launcher(layouts, config, is_causal, deterministic)
        _keep(_backwards, key, launch)
    with device_context(device):
        launch(q, k, v, do, o, logsumexp, rest, dq, dk, dv)
    return dq, dk, dv


def _keep(launchers: dict, key: tuple, launch: Problem) -> None:
    if len(launchers) >= MAX_LAUNCHERS:
        launchers.clear()
    launchers[key] = launch


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether PyTorch now multiplies matrices of this dtype in TF32 on a GPU.

    Of its switches the newest is read: it follows the older ones, which refuse to answer once it was used.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def keeps_rest(dtype: torch.dtype, tf32: bool) -> bool:
    """Whether the forward keeps what rounding L lost: where the kernels multiply with all bits of float32."""
    return dtype == torch.float32 and not tf32


# To torch.compile forward and backward are opaque operators: no graph break, nothing of Triton's to trace.
_forward_op = torch.library.custom_op("cs336_systems::flash_forward", mutates_args=())(flash_forward)
_backward_op = torch.library.custom_op("cs336_systems::flash_backward", mutates_args=())(flash_backward)


@_forward_op.register_fake
def _(q, k, v, is_causal):
    logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
    made = [_like(q), logsumexp]
    if keeps_rest(q.dtype, allows_tf32(q.dtype)):
        made.append(logsumexp.new_empty((*logsumexp.shape, 1)))
    return made


@_backward_op.register_fake
def _(do, q, k, v, o, logsumexp, is_causal, rest=None):
    return _like(q), _like(k), _like(v)


def _like(x: Tensor) -> Tensor:
    """What comes out for an x: in its layout, or in that of x flattened to four dimensions."""
    return torch.empty_like(x) if x.dim() <= 4 else torch.empty_like(x.flatten(0, -4)).reshape(x.shape)


class FlashAttentionTriton(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v in fused kernels: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and one logsumexp per query, in float32 also what rounding that lost: memory
    linear in the sequence length.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = in_autocast(q, k, v)
        if torch.compiler.is_compiling():
            check_that_they_fit(q, k, v)
            o, *sums = _forward_op(q, k, v, is_causal)
        else:
            o, *sums = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, *sums)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        gradients = once_differentiable(_gradients) if torch.is_grad_enabled() else _gradients
        return gradients(ctx, do)


def _gradients(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
    run = _backward_op if torch.compiler.is_compiling() else flash_backward
    q, k, v, o, logsumexp, *rest = ctx.saved_tensors
    return *run(do, q, k, v, o, logsumexp, ctx.is_causal, *rest), None


class FlashAttentionCompiled(FlashAttentionTriton):
    """As the handout asks for it first: the forward in Triton, the backward in PyTorch, compiled.

    It keeps what FlashAttentionTriton keeps; its backward holds matrices of scores while it runs.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor):
        q, k, v, o, logsumexp, *_ = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            return *_compiled_backward()(do, q, k, v, o, logsumexp, ctx.is_causal), None


@cache
def _compiled_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(flash_pytorch.flash_backward)
