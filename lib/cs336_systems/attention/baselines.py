"""PyTorch's own fast attentions, each by name, to be measured beside ours."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.attention.plain import reference_attention

AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """PyTorch's scaled_dot_product_attention, with whichever of its backends is switched on."""
    return F.scaled_dot_product_attention(*_four_dims(q, k, v), is_causal=is_causal).reshape(q.shape)


def switched_to(name: str) -> AbstractContextManager:
    """PyTorch's switch for the backend of a peer called sdpa_...; for others nothing.

    Entering it takes longer than a short kernel runs, so it goes around a measurement and not into it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind, _, backend = name.partition("_")
    if kind != "sdpa" or name not in PEERS:
        return nullcontext()
    return sdpa_kernel(getattr(SDPBackend, f"{backend.upper()}_ATTENTION"))


def flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """FlexAttention, compiled: PyTorch's generator of Triton attention kernels."""
    four = _four_dims(q, k, v)
    mask = _block_mask(q.shape[-2], k.shape[-2], str(q.device)) if is_causal else None
    return _compiled_flex()(*four, block_mask=mask).reshape(q.shape)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _block_mask(n_queries: int, n_keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, n_queries, n_keys, device=device)


def compiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """torch.compile of the reference."""
    return _compiled_reference()(q, k, v, is_causal)


@cache
def _compiled_reference() -> Callable[..., Tensor]:
    return torch.compile(reference_attention, dynamic=False)


def _four_dims(*tensors: Tensor) -> list[Tensor]:
    return [x[(None,) * (4 - x.dim())] for x in tensors]


PEERS: dict[str, AttentionFunction] = {
    "reference": reference_attention,
    "compiled": compiled,
    "sdpa_cudnn": sdpa,
    "sdpa_flash": sdpa,
    "sdpa_efficient": sdpa,
    "flex": flex,
}
HALF_ONLY = ("sdpa_cudnn", "sdpa_flash")  # 16-bit tensors only
COMPILED = ("compiled", "flex")  # by torch.compile, afresh for every size
