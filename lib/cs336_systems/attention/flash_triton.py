"""FlashAttention-2 with our own Triton kernels: launches, autograd.Function, and what torch.compile needs.

Two switches are PyTorch's own. float32 tensors multiply without lost bits by default, in TF32 after
torch.set_float32_matmul_precision("high") or torch.backends.cuda.matmul.fp32_precision = "tf32". And results
are deterministic, except dQ on Hopper (added in any order): torch.use_deterministic_algorithms(True) chooses
slower kernels. A backward pass multiplies as its forward did, whatever was switched in between.

Both passes are operators too, which run where `needs_dispatcher` says so. It is not asked about the tensors:
their addresses, which a launch needs anyway, are 0 for those without memory, and what is lazily negated is
resolved before: at its address the numbers still have their old sign.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import starmap
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cs336_systems.attention import flash_pytorch
from cs336_systems.attention.inputs import check_inputs, in_autocast
from cs336_systems.attention.kernel_launch import KernelLaunch
from cs336_systems.attention.launcher import Launcher, tuning_for
from cs336_systems.attention.layouts import layout
from cs336_systems.kernels.autograd_guards import (
    first_order_only,
    is_compiling,
    needs_dispatcher,
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


class Prepared(NamedTuple):
    """What a call runs, and what it makes its outputs by. It was checked when it was prepared."""

    launch: Launcher | KernelLaunch
    new_tensor: Callable[..., Tensor]
    outputs: list[tuple]  # of each: shape, strides, dtype


# By all that a call depends on: one look-up is what a call pays.
_forwards: dict[tuple, Prepared] = {}
_backwards: dict[tuple, Prepared] = {}
MAX_LAUNCHERS = 256  # of each


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[Tensor]:
    """O, L and, of float32 without lost bits, L's residual; of tensors that are not lazily negated.

    O (..., n_queries, d) in q's dtype and layout; L = logsumexp(scores) (..., n_queries) in float32, infinite
    where all scores are minus infinity (O is 0 there); residual (..., n_queries, 1), what L lost when it was
    rounded.
    """
    run = _forward_op if needs_dispatcher() else _forward
    return run(q, k, v, is_causal)


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[Tensor]:
    """The operator's implementation and the direct call, in an order that makes a later call one look-up.

    Without memory: the operator. Copies of what is not aligned. The look-up; at the first call with a key
    checks, outputs like those to be made, and a launcher. On a GPU that is not current: the same again with
    it current, where the look-up succeeds. Then the outputs are made, and the launch fills them.
    """
    # All at once: 0 if none has memory, and low bits if one of them is not aligned.
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    if not addresses:
        check_inputs(q, k, v)
        return _forward_op(q, k, v, is_causal)
    # TMA, and loads that Triton makes wide, take only aligned addresses.
    if addresses % ALIGNMENT:
        q, k, v = aligned(q), aligned(k), aligned(v)
    dtype = q.dtype
    device = q.get_device()
    tf32 = dtype is torch.float32 and allows_tf32(dtype)
    # True, or else their strides: whether all are contiguous takes less time than these.
    strides = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    if not strides:
        strides = q.stride(), k.stride(), v.stride()
    key = (
        q.shape, k.shape, v.shape, strides, dtype, k.dtype, v.dtype,
        device, k.get_device(), v.get_device(), is_causal, tf32,
    )  # fmt: skip
    prepared = _forwards.get(key)
    if prepared is None:
        check_inputs(q, k, v)
        check_device(q)
        outputs = _forward_outputs(q, tf32)
        tuning = tuning_for(dtype, q.shape[-1], q.device, tf32)
        layouts = [layout(x) for x in (q, k, v, outputs[0])]
        prepared = _keep(_forwards, key, Launcher(layouts, tuning, is_causal), outputs)
    # A launcher, what makes its outputs and Triton's launches belong to the GPU that is current.
    if not INTERPRETED and device != current_device():
        with torch.cuda.device(device):
            return _forward(q, k, v, is_causal)
    launch, new_tensor, outputs = prepared
    written = list(starmap(new_tensor, outputs))
    launch.run(q, k, v, *written)
    return written


def flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the dtypes and layouts of q, k, v. residual: of `flash_forward`, if it made one.

    Scores are computed again as forward computed them: those of float32 in TF32 if it made no residual.
    """
    run = _backward_op if needs_dispatcher() else _backward
    return run(do, q, k, v, o, logsumexp, is_causal, residual)


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_forward`, whose checks hold here: a key that is new makes a launcher at once."""
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | do.data_ptr() | o.data_ptr()
    if not addresses:
        return _backward_op(do, q, k, v, o, logsumexp, is_causal, residual)
    tf32 = residual is None
    # In TF32 no kernel reads a residual, but an address has to stand there.
    read = logsumexp if tf32 else residual
    if (addresses | logsumexp.data_ptr() | read.data_ptr()) % ALIGNMENT:
        q, k, v, do, o, logsumexp, read = map(aligned, (q, k, v, do, o, logsumexp, read))
    dtype = q.dtype
    device = q.get_device()
    deterministic = torch.are_deterministic_algorithms_enabled()
    strides = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    strides = strides and do.is_contiguous() and o.is_contiguous()
    if not strides:
        strides = q.stride(), k.stride(), v.stride(), do.stride(), o.stride()
    # dq, dk and dv have layouts that follow from those of q, k and v. k's and v's dtypes and devices are q's:
    # forward has checked them, and so its key, which is looked up before, has them.
    key = q.shape, k.shape, strides, dtype, device, is_causal, tf32, deterministic
    prepared = _backwards.get(key)
    if prepared is None:
        outputs = [torch.empty_like(x) for x in (q, k, v)]
        tuning = tuning_for(dtype, q.shape[-1], q.device, tf32)
        layouts = [layout(x) for x in (q, k, v, do, o)] + [layout(x) for x in outputs]
        launcher = Launcher(layouts, tuning, is_causal, deterministic)
        prepared = _keep(_backwards, key, launcher, outputs)
    # A launcher, what makes its outputs and Triton's launches belong to the GPU that is current.
    if not INTERPRETED and device != current_device():
        with torch.cuda.device(device):
            return _backward(do, q, k, v, o, logsumexp, is_causal, residual)
    launch, new_tensor, outputs = prepared
    gradients = tuple(starmap(new_tensor, outputs))
    launch.run(q, k, v, do, o, logsumexp, read, *gradients)
    return gradients


def _keep(
    prepared: dict[tuple, Prepared], key: tuple, launcher: Launcher, outputs: list[Tensor]
) -> Prepared:
    """What a call with this key does: `outputs` are tensors like those that the launcher writes."""
    # All of them: to know the oldest, every call would have to note when it was used.
    if len(prepared) >= MAX_LAUNCHERS:
        prepared.clear()
    factories = [(tuple(x.shape), x.stride(), x.dtype) for x in outputs]
    prepared[key] = Prepared(launcher.runner, allocator(outputs[0].device), factories)
    return prepared[key]


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether PyTorch now multiplies matrices of this dtype in TF32 on a GPU.

    Of its switches the newest is read: it follows the older ones, which refuse to answer once it was used.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


_forward_op = torch.library.custom_op("cs336_systems::flash_forward", mutates_args=())(_forward)
_backward_op = torch.library.custom_op("cs336_systems::flash_backward", mutates_args=())(_backward)


@register_flop_formula(torch.ops.cs336_systems.flash_forward)
def _(q, k, v, is_causal, **_) -> int:
    """Of two matmuls; as PyTorch counts, masked scores too."""
    return 4 * math.prod(q) * k[-2]


@register_flop_formula(torch.ops.cs336_systems.flash_backward)
def _(do, q, k, *others, **_) -> int:
    """Of five matmuls."""
    return 10 * math.prod(q) * k[-2]


@_forward_op.register_fake
def _(q, k, v, is_causal):
    check_inputs(q, k, v)
    return _forward_outputs(q, allows_tf32(q.dtype))


@_backward_op.register_fake
def _(do, q, k, v, o, logsumexp, is_causal, residual=None):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _forward_outputs(q: Tensor, tf32: bool) -> list[Tensor]:
    """Tensors like O, L and, if the forward keeps it, the residual."""
    rows = q.shape[:-1]
    outputs = [torch.empty_like(q), q.new_empty(rows, dtype=torch.float32)]
    if q.dtype == torch.float32 and not tf32:
        outputs.append(q.new_empty(rows + (1,), dtype=torch.float32))
    return outputs


class FlashAttentionTriton(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v in fused kernels: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and one logsumexp per query, in float32 also what rounding that lost: memory
    linear in the sequence length.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = in_autocast(q, k, v)
        if needs_dispatcher():
            results = _forward_op(q, k, v, is_causal)
        else:
            if q.is_neg() or k.is_neg() or v.is_neg():
                q, k, v = (x.resolve_neg() for x in (q, k, v))
            results = _forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, *results)
        ctx.is_causal = is_causal
        return results[0]

    @staticmethod
    def backward(ctx, do: Tensor):
        # Decorated, it would be one call more in the usual case. This calls it again, under no_grad.
        if torch.is_grad_enabled() and not is_compiling():
            return first_order_only(FlashAttentionTriton.backward)(ctx, do)
        q, k, v, o, logsumexp, *residual = ctx.saved_tensors
        # On its way to the operator the dispatcher resolves what is lazily negated.
        run = _backward_op if needs_dispatcher() or do.is_neg() else _backward
        dq, dk, dv = run(do, q, k, v, o, logsumexp, ctx.is_causal, *residual)
        return dq, dk, dv, None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """`FlashAttentionTriton.apply` without the Python before it that serves torch.func's transforms."""
    if is_compiling() or transforms_active():
        return FlashAttentionTriton.apply(q, k, v, is_causal)
    return _apply(q, k, v, is_causal)


# The method in C: the one in Python asks for transforms, again, and for what such a one left behind.
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
            dq, dk, dv = _compiled_backward()(
                do.resolve_neg(), q, k, v, o, logsumexp, ctx.is_causal
            )
        return dq, dk, dv, None


@cache
def _compiled_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(flash_pytorch.flash_backward)
