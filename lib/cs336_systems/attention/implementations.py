"""Every implementation of attention that is compared, by name: one more is a file and an entry here."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cs336_systems.accounting import attention_peak_breakdown
from cs336_systems.attention import baselines
from cs336_systems.attention.flash_pytorch import FlashAttentionPyTorch
from cs336_systems.attention.inputs import AttentionFunction
from cs336_systems.attention.plain import plain_attention
from cs336_systems.dtypes import torch_dtype
from cs336_systems.kernels import why_no_triton

# What an implementation may need: Triton, a compiler for torch.compile, tensors of 16 bits.
TRITON, COMPILER, SIXTEEN_BITS = "triton", "compiler", "16bit"


@dataclass(frozen=True)
class Implementation:
    """An attention implementation.

    load: returns the function, called as function(q, k, v, is_causal); what needs Triton is imported then.
    needs: TRITON, COMPILER, SIXTEEN_BITS.
    sdpa_backend: the backend of PyTorch's scaled_dot_product_attention to switch on around it.
    in_model: a model's blocks may call it, and `attention.attention` knows it.
    holds_scores: its memory grows with n_queries * n_keys.
    """

    load: Callable[[], AttentionFunction]
    needs: frozenset[str] = frozenset()
    sdpa_backend: str = ""
    in_model: bool = False
    holds_scores: bool = False

    def why_not(self, dtype: str, device: torch.device) -> str:
        """Why it cannot run in a dtype of DTYPES on the device, as far as that is known before; or ""."""
        if SIXTEEN_BITS in self.needs and torch_dtype(dtype).itemsize != 2:
            return "takes 16-bit tensors only"
        return why_no_triton(device) if TRITON in self.needs else ""


def _flash_triton(compiled: bool = False) -> AttentionFunction:
    from cs336_systems.attention.flash_triton import FlashAttentionCompiled, flash_attention

    return FlashAttentionCompiled.apply if compiled else flash_attention


def _sdpa(backend: str, *needs: str) -> Implementation:
    return Implementation(lambda: baselines.sdpa, frozenset(needs), backend)


ATTENTION: dict[str, Implementation] = {
    "plain": Implementation(lambda: plain_attention, in_model=True, holds_scores=True),
    "torch_softmax": Implementation(lambda: baselines.torch_softmax, holds_scores=True),
    "compiled": Implementation(
        lambda: baselines.compiled, frozenset({COMPILER}), holds_scores=True
    ),
    "sdpa": Implementation(lambda: baselines.sdpa, in_model=True),
    "sdpa_efficient": _sdpa("EFFICIENT_ATTENTION"),
    "sdpa_flash": _sdpa("FLASH_ATTENTION", SIXTEEN_BITS),
    "flex": Implementation(lambda: baselines.flex, frozenset({COMPILER})),
    "sdpa_cudnn": _sdpa("CUDNN_ATTENTION", SIXTEEN_BITS),
    "flash_pytorch": Implementation(lambda: FlashAttentionPyTorch.apply, in_model=True),
    "flash_compiled": Implementation(
        lambda: _flash_triton(compiled=True), frozenset({TRITON, COMPILER})
    ),
    "flash_triton": Implementation(_flash_triton, frozenset({TRITON}), in_model=True),
}
OURS = "flash_triton"
# What a model's blocks may be given; "auto" is the fastest of them that can run the tensors.
MODEL_ATTENTION = ("auto",) + tuple(name for name, entry in ATTENTION.items() if entry.in_model)
# Attention alone has nothing to train.
ATTENTION_PASSES = ("forward", "backward", "forward_backward")


def why_not(case: Any, machine_lacks: Callable[..., str]) -> str:
    """Why a case of a benchmark cannot run here, or "".

    Args:
        case: has implementation, batch_size, context_length, d_head, is_causal, pass_, dtype and device.
        machine_lacks: asked with (device, dtype, needs, needed_bytes), the reason that lies in the machine.
    """
    entry = ATTENTION[case.implementation]
    needed_bytes = 0
    if entry.holds_scores:
        sizes = case.batch_size, case.context_length, case.d_head
        alive = attention_peak_breakdown(*sizes, case.pass_, case.dtype, case.is_causal)
        needed_bytes = sum(alive.values())
    reason = entry.why_not(case.dtype, case.device)
    return reason or machine_lacks(case.device, case.dtype, entry.needs, needed_bytes)


def sdpa_backend(name: str) -> AbstractContextManager:
    """Switches on the backend of scaled_dot_product_attention that this attention stands for, if any.

    Entering it takes longer than a short kernel runs, so it goes around a measurement and not into it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = ATTENTION[name].sdpa_backend if name in ATTENTION else ""
    return sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext()
