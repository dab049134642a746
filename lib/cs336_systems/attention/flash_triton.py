"""FlashAttention-2 with our own Triton kernels: launches, autograd.Function, and what torch.compile needs.

Two switches are PyTorch's own. float32 tensors multiply with all their bits by default, in TF32 after
torch.set_float32_matmul_precision("high") or torch.backends.cuda.matmul.fp32_precision = "tf32". And the
result has the same bits every time, but for dQ on Hopper, which is added up there in the order in which
programs come: so it is deterministic everywhere after torch.use_deterministic_algorithms(True), and slower.
A backward pass multiplies as its forward did, whatever was switched in between.
"""

from collections.abc import Callable
from functools import cache
from itertools import starmap

import torch
from torch import Tensor

from cs336_systems.attention import flash_pytorch
from cs336_systems.attention.inputs import check_that_they_fit, in_autocast
from cs336_systems.attention.kernel_launch import KernelLaunch
from cs336_systems.attention.launcher import (
    Problem,
    backward_launcher,
    config_for,
    forward_launcher,
    layout,
)
from cs336_systems.kernels.autograd_guards import first_order_only
from cs336_systems.kernels.runtime import (
    ALIGNMENT,
    INTERPRETED,
    aligned,
    allocator,
    check_device,
    current_device,
)

# What to run, by all that it depends on. One look-up is what a call pays; what is found was checked before.
Prepared = tuple[Problem | KernelLaunch, Callable[..., Tensor], list[tuple]]  # to run, to make outputs by
_forwards: dict[tuple, Prepared] = {}
_backwards: dict[tuple, Prepared] = {}
MAX_LAUNCHERS = 256  # of each


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[Tensor]:
    """O, L and, of float32 with all its bits, rest.

    O (..., n_queries, d) in q's dtype and layout; L = logsumexp(scores) (..., n_queries) in float32; rest
    (..., n_queries, 1), what L lost when it was rounded.
    """
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        q, k, v = aligned(q), aligned(k), aligned(v)
    dtype, device = q.dtype, q.get_device()
    tf32 = dtype is torch.float32 and allows_tf32(dtype)
    contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()  # takes less time than strides
    key = (
        q.shape, k.shape, v.shape, contiguous or (q.stride(), k.stride(), v.stride()),
        dtype, k.dtype, v.dtype, device, k.get_device(), v.get_device(), is_causal, tf32,
    )  # fmt: skip
    prepared = _forwards.get(key)
    if prepared is None:
        if q.dim() > 4:
            o, *sums = flash_forward(*(x.flatten(0, -4) for x in (q, k, v)), is_causal)
            return [o.reshape(q.shape), *(x.reshape(*q.shape[:-1], *x.shape[3:]) for x in sums)]
        if INTERPRETED and dtype == torch.bfloat16:  # the interpreter multiplies bfloat16's bit patterns
            o, logsumexp, _ = flash_forward(q.float(), k.float(), v.float(), is_causal)
            return [o.to(dtype), logsumexp]
        check_that_they_fit(q, k, v)
        check_device("q, k, v", q)
        config = config_for(dtype, q.shape[-1], q.device, tf32)
        outputs = _forward_outputs(q, tf32)
        layouts = tuple(layout(x) for x in (q, k, v, outputs[0]))
        prepared = _keep(_forwards, key, forward_launcher(layouts, config, is_causal), outputs)
    if not INTERPRETED and device != current_device():
        with torch.cuda.device(device):
            return flash_forward(q, k, v, is_causal)
    launch, new_tensor, outputs = prepared
    made = [*starmap(new_tensor, outputs)]
    launch.run(q, k, v, *made)
    return made


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor, is_causal: bool,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV in the dtypes and layouts of q, k, v. rest: of `flash_forward`, if it made one.

    Scores are computed again as forward computed them: those of float32 in TF32 if it made no rest.
    """
    tf32 = rest is None
    if tf32:
        rest = logsumexp  # any tensor: none is read
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | do.data_ptr() | o.data_ptr()
    if (addresses | logsumexp.data_ptr() | rest.data_ptr()) % ALIGNMENT:
        q, k, v, do, o, logsumexp, rest = (aligned(x) for x in (q, k, v, do, o, logsumexp, rest))
    dtype, device, deterministic = q.dtype, q.get_device(), torch.are_deterministic_algorithms_enabled()
    contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    contiguous = contiguous and do.is_contiguous() and o.is_contiguous()
    key = (  # dq, dk and dv have layouts that follow from those of q, k and v
        q.shape, k.shape, contiguous or (q.stride(), k.stride(), v.stride(), do.stride(), o.stride()),
        dtype, device, is_causal, tf32, deterministic,
    )  # fmt: skip
    prepared = _backwards.get(key)
    if prepared is None:
        if q.dim() > 4:
            rest = None if tf32 else rest
            grads = flash_backward(*(x.flatten(0, -4) for x in (do, q, k, v, o)), logsumexp, is_causal, rest)
            return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
        if INTERPRETED and dtype == torch.bfloat16:
            inputs, rest = (x.float() for x in (do, q, k, v, o)), torch.zeros_like(logsumexp)
            return tuple(x.to(dtype) for x in flash_backward(*inputs, logsumexp, is_causal, rest))
        config = config_for(dtype, q.shape[-1], q.device, tf32)
        outputs = [torch.empty_like(x) for x in (q, k, v)]
        layouts = tuple(layout(x) for x in (q, k, v, do, o, *outputs))
        launcher = backward_launcher(layouts, config, is_causal, deterministic)
        prepared = _keep(_backwards, key, launcher, outputs)
    if not INTERPRETED and device != current_device():
        with torch.cuda.device(device):
            return flash_backward(do, q, k, v, o, logsumexp, is_causal, None if tf32 else rest)
    launch, new_tensor, outputs = prepared
    gradients = (*starmap(new_tensor, outputs),)
    launch.run(q, k, v, do, o, logsumexp, rest, *gradients)
    return gradients


def _keep(where: dict[tuple, Prepared], key: tuple, launcher: Problem, outputs: list[Tensor]) -> Prepared:
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


# To torch.compile forward and backward are opaque operators: no graph break, nothing of Triton's to trace.
_forward_op = torch.library.custom_op("cs336_systems::flash_forward", mutates_args=())(flash_forward)
_backward_op = torch.library.custom_op("cs336_systems::flash_backward", mutates_args=())(flash_backward)


@_forward_op.register_fake
def _(q, k, v, is_causal):
    return [_like(q), *_forward_outputs(q, allows_tf32(q.dtype))[1:]]


@_backward_op.register_fake
def _(do, q, k, v, o, logsumexp, is_causal, rest=None):
    return _like(q), _like(k), _like(v)


def _forward_outputs(q: Tensor, tf32: bool) -> list[Tensor]:
    """Tensors like O, L and, if the forward keeps it, rest."""
    rows = q.shape[:-1]
    shapes = [rows, (*rows, 1)] if q.dtype == torch.float32 and not tf32 else [rows]
    return [torch.empty_like(q), *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)]


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
            made = _forward_op(q, k, v, is_causal)
        else:
            made = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, *made)
        ctx.is_causal = is_causal
        return made[0]

    @staticmethod
    def backward(ctx, do: Tensor):
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not compiling:
            return first_order_only(FlashAttentionTriton.backward)(ctx, do)
        run = _backward_op if compiling else flash_backward
        q, k, v, o, logsumexp, *rest = ctx.saved_tensors
        return *run(do, q, k, v, o, logsumexp, ctx.is_causal, *rest), None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """`FlashAttentionTriton.apply` without the Python before it that serves torch.func's transforms."""
    if torch.compiler.is_compiling() or _transforms_active():
        return FlashAttentionTriton.apply(q, k, v, is_causal)
    return _apply(q, k, v, is_causal)


_transforms_active = torch._C._are_functorch_transforms_active
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
