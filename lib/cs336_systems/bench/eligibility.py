"""What may be timed: attention functions by name, and whether they are right at a size on this machine."""

import torch
from torch import Tensor

from cs336_systems import attention
from cs336_systems.attention.baselines import (
    COMPILED,
    HALF_ONLY,
    PEERS,
    AttentionFunction,
    switched_to,
)
from cs336_systems.checks.attention_checks import AttentionCase, check_attention
from cs336_systems.measure.compiling import why_no_compile, why_no_triton
from cs336_systems.measure.timing import Timing, matmul_precision, one_line

OURS = "flash_triton"
IMPLEMENTATIONS: dict[str, AttentionFunction] = {OURS: attention.IMPLEMENTATIONS[OURS], **PEERS}
if attention.HAS_TRITON:  # without the named range around it, which is work for the host
    IMPLEMENTATIONS[OURS] = attention.FlashAttentionTriton.apply
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")} | {"tf32": torch.float32}
# Relative. TF32 keeps ten bits of a factor; plain attention rounds at every step, fused attention does not.
TF32_ERROR = 5e-3
PEER_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}


def why_not(
    name: str, function: AttentionFunction, dtype: str, d_head: int, device: torch.device
) -> Timing | None:
    """The status of what must not be timed: it does not take the dtype, does not run, or is wrong."""
    if name in COMPILED:
        torch._dynamo.reset()  # it stops compiling after eight sizes
        if refused := cannot_compile(device):
            return refused
    if name == OURS and (reason := why_no_triton(device)):
        return Timing(status="skipped", reason=reason)
    if name in HALF_ONLY and DTYPES[dtype] == torch.float32:
        return Timing(status="skipped", reason=f"{name} takes 16-bit tensors only")
    wrong = why_wrong(name, function, dtype, d_head, device)
    return Timing(status="error", reason=wrong) if wrong else None


_verdicts: dict[tuple, str] = {}


def why_wrong(name: str, function: AttentionFunction, dtype: str, d_head: int, device: torch.device) -> str:
    """What check_attention or PyTorch says against it at this dtype and head size; "" when all is well.

    PyTorch's own functions need only be right by and large. A verdict is remembered.
    """
    key = (name, function, dtype, d_head, device)
    if key not in _verdicts:
        _verdicts[key] = _checked(name, function, dtype, d_head, device)
    return _verdicts[key]


def _checked(name: str, function: AttentionFunction, dtype: str, d_head: int, device: torch.device) -> str:
    cases = [AttentionCase("whole tiles", (2,), 256, 256, d_head, is_causal=True)]
    if name not in PEERS and dtype != "tf32":
        cases.append(AttentionCase("large scores", (8,), 128, 128, d_head, is_causal=True, logit_scale=30.0))
    allowed = PEER_ERROR[DTYPES[dtype]] if name in PEERS else None
    if dtype == "tf32":
        allowed = TF32_ERROR

    def switched(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        with switched_to(name):  # not around the check itself, whose yardstick is PyTorch's choice
            return function(q, k, v, is_causal)

    try:
        check_attention(switched, cases=cases, dtype=DTYPES[dtype], device=device, allowed_error=allowed)
    except Exception as error:  # a wrong result, or whatever a compiler or a launcher raises
        return one_line(error)
    return ""


def check_ours(dtype: str, d_head: int, device: str) -> str:
    """`why_wrong` of our kernels, for another process: what Triton compiles there is on disk for all."""
    with matmul_precision(dtype):
        return _checked(OURS, IMPLEMENTATIONS[OURS], dtype, d_head, torch.device(device))


def remember(dtype: str, d_head: int, device: torch.device, verdict: str) -> None:
    """Keep a verdict of `check_ours`."""
    _verdicts[OURS, IMPLEMENTATIONS[OURS], dtype, d_head, device] = verdict


def cannot_compile(device: torch.device) -> Timing | None:
    """The status of torch.compile where it cannot work."""
    reason = why_no_compile(device)
    return Timing(status="skipped", reason=reason) if reason else None
