"""The last linear layer and the loss together, without ever holding the logits of all tokens.

A chunk of tokens goes through the layer, its logits become their gradient in place, and that is multiplied
back at once into the gradients of the hidden states and of the weight: all of backward but a factor happens
in forward (Hsu et al. 2024, Liger Kernel). Memory: one chunk of logits, and both gradients, the weight's in
float32. FLOPs: those of the plain model. The factor, d(loss) / count, comes last and in float32: float16 has
no room for softmax / 65,536.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from cs336_systems.functional import at_least_float32
from cs336_systems.kernels import why_no_triton
from cs336_systems.kernels.autograd_guards import first_order_only
from cs336_systems.kernels.tensors import KERNEL_DTYPES, check_tensors

IGNORED = -100  # the target that does not count, as in PyTorch


def plain_cross_entropy_(logits: Tensor, targets: Tensor) -> Tensor:
    """As `kernels.cross_entropy.cross_entropy_`, in PyTorch: where Triton's kernels do not run."""
    counts = (targets != IGNORED)[:, None]
    index = targets[:, None].where(counts, 0)
    logits32 = at_least_float32(logits)
    losses = F.cross_entropy(logits32, targets, reduction="none")
    minus_one = -torch.ones_like(index, dtype=torch.float32)
    gradient = logits32.softmax(-1).scatter_add_(-1, index, minus_one)
    logits.copy_(gradient.where(counts, 0))
    return losses


def cross_entropy_(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses (n,) in float32; the logits (n, vocabulary) become the gradient of their sum."""
    if why_no_triton(logits.device):
        return plain_cross_entropy_(logits, targets)
    from cs336_systems.kernels import cross_entropy

    return cross_entropy.cross_entropy_(logits, targets)


class LinearCrossEntropy(torch.autograd.Function):
    """`apply(hidden, weight, targets, chunk_tokens)`: see `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk_tokens: int) -> Tensor:
        # Empty, to lead first_order_only to the inputs, which are not saved.
        with torch.enable_grad():
            sources = [x.flatten()[:0].clone() for x in (hidden, weight)]
        rows = hidden.detach().reshape(-1, hidden.shape[-1])
        targets = targets.reshape(-1)
        # A product into memory that is there cannot be traced of one with a gradient.
        weight = weight.detach()
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_rows = torch.empty_like(rows) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for first in range(0, len(rows), chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            logits = rows[chunk] @ weight.T
            total += cross_entropy_(logits, targets[chunk]).sum()
            # From here on the logits are their gradient.
            if wants_hidden:
                torch.mm(logits, weight, out=d_rows[chunk])
            if wants_weight:
                _add_product(d_weight, logits, rows[chunk])
            del logits  # before the next chunk's are made
        count = (targets != IGNORED).sum()
        ctx.save_for_backward(d_rows, d_weight, count, *sources)
        ctx.dtype = hidden.dtype
        ctx.shape = hidden.shape
        return total / count

    @staticmethod
    @first_order_only
    def backward(ctx, d_loss: Tensor):
        d_rows, d_weight, count, *_ = ctx.saved_tensors
        factor = d_loss.float() / count.clamp(min=1)
        d_hidden = None
        if d_rows is not None:
            d_hidden = scaled(d_rows, factor, ctx.dtype).reshape(ctx.shape)
        if d_weight is not None:
            d_weight = scaled(d_weight, factor, ctx.dtype)
        return d_hidden, d_weight, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right, added up in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    else:
        # cuBLAS alone multiplies 16-bit numbers into float32; elsewhere they are made float32 first.
        total.addmm_(left.T.float(), right.float())


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a float32 number, multiplied in float32 and rounded once, without a float32 copy of x."""
    product = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.mul(x, factor.reshape((1,) * x.dim()), out=product)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int = 4096,
) -> Tensor:
    """Mean of -log softmax(hidden weight^T)[target] over the targets that count, in nats: a float32 number.

    Args:
        hidden: (..., d) of float32, bfloat16 or float16; inside torch.autocast in the region's dtype.
        weight: (vocabulary, d), of hidden's dtype.
        targets: (...) int64; -100 does not count. As PyTorch's, the loss is NaN and its gradients are 0 where
            none counts. Of a kernel it is NaN, too, where a target is not in the vocabulary.
        chunk_tokens: tokens whose logits are held at a time; changes memory, not the result.

    Raises:
        TypeError: dtypes that differ or are not supported.
        ValueError: shapes or devices that do not fit.
    """
    device = "cpu" if hidden.is_meta else hidden.device.type  # autocast does not know meta
    dtypes = {hidden.dtype, weight.dtype}
    if torch.is_autocast_enabled(device) and dtypes.issubset(KERNEL_DTYPES):
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
    fits = weight.dim() == 2 and 0 not in weight.shape and hidden.shape[-1:] == weight.shape[1:]
    allowed = "(..., d) and (vocabulary, d), d and vocabulary at least 1"
    check_tensors("hidden, weight", hidden, weight, fits=fits, allowed=allowed, same_dtype=True)
    if targets.dtype != torch.int64:
        raise TypeError(f"targets are {targets.dtype}; allowed: torch.int64")
    if targets.shape != hidden.shape[:-1] or targets.device != hidden.device:
        allowed = f"{tuple(hidden.shape[:-1])} on {hidden.device}"
        raise ValueError(
            f"targets are {tuple(targets.shape)} on {targets.device}; allowed: {allowed}"
        )
    # Else forward would make the gradients, though nobody can ask for them.
    if not torch.is_grad_enabled():
        hidden = hidden.detach()
        weight = weight.detach()
    with torch.autocast(device, enabled=False):
        return LinearCrossEntropy.apply(hidden, weight, targets, chunk_tokens)
