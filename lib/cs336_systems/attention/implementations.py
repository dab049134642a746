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
from cs336_systems.kernels import HAS_TRITON, why_no_triton

if HAS_TRITON:
    from cs336_systems.attention.flash_triton import FlashAttentionCompiled, flash_attention

    with_compiled_backward = FlashAttentionCompiled.apply
else:

    def flash_attention(*_: Any) -> None:
        raise ImportError("this attention needs triton, which is not installed here")

    with_compiled_backward = flash_attention

# What an implementation may need: Triton, a compiler for torch.compile, tensors of 16 bits.
TRITON, COMPILER, SIXTEEN_BITS = "triton", "compiler", "16bit"


@dataclass(frozen=True)
class Implementation:
    """An attention implementation.

    function: called as function(q, k, v, is_causal).
    needs: TRITON, COMPILER, SIXTEEN_BITS.
    sdpa_backend: the backend of PyTorch's scaled_dot_product_attention to switch on around it.
    in_model: a model's blocks may call it, and `attention.attention` knows it.
    holds_scores: its memory grows with n_queries * n_keys.
    """

    function: AttentionFunction
    needs: frozenset[str] = frozenset()
    sdpa_backend: str = ""
    in_model: bool = False
    holds_scores: bool = False

    def why_not(self, dtype: str, device: torch.device) -> str:
        """Why it cannot run in a dtype of DTYPES on the device: by itself, or for want of Triton; or "".

        The function `why_not` asks about the machine, too: its compiler, its memory.
        """
        if SIXTEEN_BITS in self.needs and torch_dtype(dtype).itemsize != 2:
            return "takes 16-bit tensors only"
        return why_no_triton(device) if TRITON in self.needs else ""


def _sdpa(backend: str, *needs: str) -> Implementation:
    return Implementation(baselines.sdpa, frozenset(needs), backend)


ATTENTION: dict[str, Implementation] = {
    "plain": Implementation(plain_attention, in_model=True, holds_scores=True),
    "torch_softmax": Implementation(baselines.torch_softmax, holds_scores=True),
    "compiled": Implementation(baselines.compiled, frozenset({COMPILER}), holds_scores=True),
    "sdpa": Implementation(baselines.sdpa, in_model=True),
    "sdpa_efficient": _sdpa("EFFICIENT_ATTENTION"),
    "sdpa_flash": _sdpa("FLASH_ATTENTION", SIXTEEN_BITS),
    "flex": Implementation(baselines.flex, frozenset({COMPILER})),
    "sdpa_cudnn": _sdpa("CUDNN_ATTENTION", SIXTEEN_BITS),
    "flash_pytorch": Implementation(FlashAttentionPyTorch.apply, in_model=True),
    "flash_compiled": Implementation(with_compiled_backward, frozenset({TRITON, COMPILER})),
    "flash_triton": Implementation(flash_attention, frozenset({TRITON}), in_model=True),
}
OURS = "flash_triton"
# What a model's blocks may be given; "auto" is ours where it can run the tensors, else "sdpa".
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
