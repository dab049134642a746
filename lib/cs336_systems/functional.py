"""The functions of the model and its loss, written out in plain torch."""

import torch
from einops import rearrange
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself if it is float32 or float64, a float32 copy if it is 16-bit; TypeError: it has no floats.

    Sums of many terms are taken in this precision. The cast is explicit, and not left to autocast, because
    autocast promotes different operations on a CPU and on a GPU.
    """
    if not x.is_floating_point():
        raise TypeError(f"a tensor has dtype {x.dtype}; allowed: a floating-point dtype")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along `dim`; the same shape and type as `x`, computed in float32 or better.

    The maximum is subtracted first, so that exp never overflows. The result does not depend on the number
    subtracted, hence no gradient flows through the maximum.
    """
    largest = 0  # of an empty dimension, which has no maximum
    if x.shape[dim]:
        largest = x.detach().amax(dim, keepdim=True)
    exponentials = torch.exp(at_least_float32(x) - largest)
    quotient = exponentials / exponentials.sum(dim, keepdim=True)
    return quotient.to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), also called swish (Elfwing et al. 2017)."""
    return x * torch.sigmoid(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019), in x's type.

    Computed in float32 even for 16-bit input, whose squares overflow (float16) or lose digits (bfloat16).
    """
    wide = at_least_float32(x)
    inverse_rms = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scaled = wide * inverse_rms * weight
    return scaled.to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[2k], x[2k+1]) at position p by the angle whose cosine is cos[p, k] (Su et al. 2021).

    x is (..., s, d), cos and sin are (s, d / 2); the same shape and type as `x`.
    """
    even, odd = rearrange(x, "... (pair two) -> two ... pair", two=2)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rearrange(turned, "... pair two -> ... (pair two)").to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions of -log softmax(logits)[target], in nats, computed in float32 or better.

    logits are (..., vocabulary), targets (...), class indices in [0, vocabulary).

    Raises:
        ValueError: the leading dimensions of the logits are not the shape of the targets.
    """
    leading = logits.shape[:-1]
    if leading != targets.shape:
        allowed = tuple(targets.shape)
        raise ValueError(f"logits are of {tuple(leading)}; allowed: {allowed}, the targets' shape")
    logits = at_least_float32(logits)
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    losses = logits.logsumexp(-1) - target_logits
    return losses.mean()
