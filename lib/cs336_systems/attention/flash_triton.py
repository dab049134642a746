"""FlashAttention-2 with our own Triton kernels: launches, autograd.Function, and what torch.compile needs.

Two switches are PyTorch's own. float32 tensors multiply without lost bits by default, in TF32 after
torch.set_float32_matmul_precision("high") or torch.backends.cuda.matmul.fp32_precision = "tf32". And results
are deterministic, except dQ on Hopper (added in any order): torch.use_deterministic_algorithms(True) chooses
slower kernels. A backward pass multiplies as its forward did, whatever was switched in between.

A launch by address bypasses PyTorch's dispatcher, and what that does for every operator. So where that has
anything to do (compilers, fake tensors, tracing, tensors without memory of their own) the passes go through
it as operators. Lazily negated views need no such detour: their addresses are odd, so they are copied.
"""

from collections.abc import Callable
from functools import cache
from itertools import starmap

import torch
from torch import Tensor

from cs336_systems.attention import flash_pytorch
from cs336_systems.attention.inputs import check_inputs, in_autocast
from cs336_systems.attention.kernel_launch import KernelLaunch
from cs336_systems.attention.launcher import Launcher, layout, tuning_for
from cs336_systems.kernels.autograd_guards import (
    dispatch_modes,
    first_order_only,
    transforms_active,
)
from cs336_systems.kernels.runtime import (
    ALIGNMENT,
    INTERPRETED,
    aligned,
    allocator,
    check_device,
    current_device,
)

# What to run, by all that it depends on. One look-up is what a call pays; what is found was checked before.
Prepared = tuple[
    Launcher | KernelLaunch, Callable[..., Tensor], list[tuple]
]  # to run, to make outputs by
_forwards: dict[tuple, Prepared] = {}
_backwards: dict[tuple, Prepared] = {}
MAX_LAUNCHERS = 256  # of each


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[Tensor]:
    """O, L and, of float32 without lost bits, L's residual.

    O (..., n_queries, d) in q's dtype and layout; L = logsumexp(scores) (..., n_queries) in float32, infinite
    where all scores are minus infinity (O is 0 there); residual (..., n_queries, 1), what L lost when it was
    rounded.
    """
    run = _forward_op if torch.compiler.is_compiling() or dispatch_modes() else _forward
    return run(q, k, v, is_causal)


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[Tensor]:
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    if not addresses:
        check_inputs(q, k, v)
        return _forward_op(q, k, v, is_causal)  # fake tensors, outside their mode
    if addresses % ALIGNMENT:
        q, k, v = aligned(q), aligned(k), aligned(v)
    dtype, device = q.dtype, q.get_device()
    tf32 = dtype is torch.float32 and allows_tf32(dtype)
    contiguous = (
        q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    )  # takes less time than strides
    key = (
        q.shape, k.shape, v.shape, contiguous or (q.stride(), k.stride(), v.stride()),
        dtype, k.dtype, v.dtype, device, k.get_device(), v.get_device(), is_causal, tf32,
    )  # fmt: skip
    prepared = _forwards.get(key)
    if prepared is None:
        check_inputs(q, k, v)
        check_device(q)
        if q.dim() > 4:
            o, *sums = _forward(*(x.flatten(0, -4) for x in (q, k, v)), is_causal)
            return [o.reshape(q.shape), *(x.reshape(*q.shape[:-1], *x.shape[3:]) for x in sums)]
        tuning = tuning_for(dtype, q.shape[-1], q.device, tf32)
        outputs = _forward_outputs(q, tf32)
        layouts = [layout(x) for x in (q, k, v, outputs[0])]
        prepared = _keep(_forwards, key, Launcher(layouts, tuning, is_causal), outputs)
    if not INTERPRETED and device != current_device():
        with torch.cuda.device(device):
            return _forward(q, k, v, is_causal)
    launch, new_tensor, outputs = prepared
    made = [*starmap(new_tensor, outputs)]
    launch.run(q, k, v, *made)
    return made


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor, is_causal: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV in the dtypes and layouts of q, k, v. residual: of `flash_forward`, if it made one.

    Scores are computed again as forward computed them: those of float32 in TF32 if it made no residual.
    """
    run = _backward_op if torch.compiler.is_compiling() or dispatch_modes() else _backward
    return run(do, q, k, v, o, logsumexp, is_causal, residual)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor, is_causal: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tf32 = residual is None
    if tf32:
        residual = logsumexp  # any tensor: none is read
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | do.data_ptr() | o.data_ptr()
    if not addresses:
        return _backward_op(do, q, k, v, o, logsumexp, is_causal, None if tf32 else residual)
    if (addresses | logsumexp.data_ptr() | residual.data_ptr()) % ALIGNMENT:
        q, k, v, do, o, logsumexp, residual = map(aligned, (q, k, v, do, o, logsumexp, residual))
    dtype, device, deterministic = (
        q.dtype,
        q.get_device(),
        torch.are_deterministic_algorithms_enabled(),
    )
    contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    contiguous = contiguous and do.is_contiguous() and o.is_contiguous()
    key = (  # dq, dk and dv have layouts that follow from those of q, k and v
        q.shape, k.shape, contiguous or (q.stride(), k.stride(), v.stride(), do.stride(), o.stride()),
        dtype, device, is_causal, tf32, deterministic,
    )  # fmt: skip
    prepared = _backwards.get(key)
    if prepared is None:
        if q.dim() > 4:
            residual = None if tf32 else residual
            grads = _backward(
                *(x.flatten(0, -4) for x in (do, q, k, v, o)), logsumexp, is_causal, residual
            )
            return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
        tuning = tuning_for(dtype, q.shape[-1], q.device, tf32)
        outputs = [torch.empty_like(x) for x in (q, k, v)]
        layouts = [layout(x) for x in (q, k, v, do, o, *outputs)]
        prepared = _keep(
            _backwards, key, Launcher(layouts, tuning, is_causal, deterministic), outputs
        )
    if not INTERPRETED and device != current_device():
        with torch.cuda.device(device):
            return _backward(do, q, k, v, o, logsumexp, is_causal, None if tf32 else residual)
    launch, new_tensor, outputs = prepared
    gradients = (*starmap(new_tensor, outputs),)
    launch.run(q, k, v, do, o, logsumexp, residual, *gradients)
    return gradients


def _keep(
    where: dict[tuple, Prepared], key: tuple, launcher: Launcher, outputs: list[Tensor]
) -> Prepared:
    """What a call with this key does: `outputs` are tensors like those that the launcher writes."""
    if len(where) >= MAX_LAUNCHERS:
        where.clear()
    made = [(tuple(x.shape), x.stride(), x.dtype) for x in outputs]
    where[key] = launcher.runner, allocator(outputs[0].device), made
    return where[key]


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether PyTorch now multiplies matrices of this dtype in TF32 on a GPU.

    Of its switches the newest is read: it follows the older ones, which refuse to answer once it was used.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


_forward_op = torch.library.custom_op("cs336_systems::flash_forward", mutates_args=())(_forward)
_backward_op = torch.library.custom_op("cs336_systems::flash_backward", mutates_args=())(_backward)


@_forward_op.register_fake
def _(q, k, v, is_causal):
    check_inputs(q, k, v)
    return [_like(q), *_forward_outputs(q, allows_tf32(q.dtype))[1:]]


@_backward_op.register_fake
def _(do, q, k, v, o, logsumexp, is_causal, residual=None):
    return _like(q), _like(k), _like(v)


def _forward_outputs(q: Tensor, tf32: bool) -> list[Tensor]:
    """Tensors like O, L and, if the forward keeps it, the residual."""
    rows = q.shape[:-1]
    shapes = [rows, (*rows, 1)] if q.dtype == torch.float32 and not tf32 else [rows]
    return [torch.empty_like(q), *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)]


def _like(x: Tensor) -> Tensor:
    """What comes out for an x: in its layout, or in that of x flattened to four dimensions."""
    return (
        torch.empty_like(x) if x.dim() <= 4 else torch.empty_like(x.flatten(0, -4)).reshape(x.shape)
    )


class FlashAttentionTriton(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v in fused kernels: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and one logsumexp per query, in float32 also what rounding that lost: memory
    linear in the sequence length.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = in_autocast(q, k, v)
        run = _forward_op if torch.compiler.is_compiling() or dispatch_modes() else _forward
        made = run(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, *made)
        ctx.is_causal = is_causal
        return made[0]

    @staticmethod
    def backward(ctx, do: Tensor):
        compiling = torch.compiler.is_compiling()
        if (
            torch.is_grad_enabled() and not compiling
        ):  # decorated, it would be a call more in the usual case
            return first_order_only(FlashAttentionTriton.backward)(ctx, do)
        run = _backward_op if compiling or dispatch_modes() else _backward
        q, k, v, o, logsumexp, *residual = ctx.saved_tensors
        return *run(do, q, k, v, o, logsumexp, ctx.is_causal, *residual), None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """`FlashAttentionTriton.apply` without the Python before it that serves torch.func's transforms."""
    if torch.compiler.is_compiling() or transforms_active():
        return FlashAttentionTriton.apply(q, k, v, is_causal)
    return _apply(q, k, v, is_causal)


_apply = super(torch.autograd.Function, FlashAttentionTriton).apply


class FlashAttentionCompiled(FlashAttentionTriton):
    """As the handout asks for it first: the forward in Triton, the backward in PyTorch, compiled.

    It keeps what FlashAttentionTriton keeps; its backward holds matrices of scores while it runs.
    """

    @staticmethod
    @first_order_only
    def backward(ctx, do: Tensor):
        q, k, v, o, logsumexp, *_ = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            return *_compiled_backward()(do, q, k, v, o, logsumexp, ctx.is_causal), None


@cache
def _compiled_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(flash_pytorch.flash_backward)
