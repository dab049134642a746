"""What may be timed: an attention that this machine can run, and that check_attention finds right."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from cs336_systems import names
from cs336_systems.attention.baselines import sdpa_backend
from cs336_systems.checks.attention_checks import AttentionCase, check_attention
from cs336_systems.measure.requirements import why_no_attention
from cs336_systems.measure.timing import Timing, one_line

# Relative. TF32 keeps ten bits of a factor; plain attention rounds at every step, fused attention does not.
TF32_ERROR = 5e-3
BASELINE_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}
AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def backend_of(name: str) -> AbstractContextManager:
    """`attention.baselines.sdpa_backend`; nothing for an attention that the registry does not know."""
    return sdpa_backend(name) if name in names.ATTENTION else nullcontext()


def why_not(
    name: str, function: AttentionFunction, dtype: str, d_head: int, device: torch.device
) -> Timing | None:
    """The status of what must not be timed: it does not take the dtype, cannot run here, or is wrong.

    A verdict of check_attention is remembered for each function, dtype, head size and device.
    """
    if name in names.ATTENTION and names.COMPILER in names.ATTENTION[name].needs:
        torch._dynamo.reset()  # it stops compiling after eight sizes
    if reason := why_no_attention(name, dtype, device):
        return Timing(status="skipped", reason=reason)
    wrong = why_wrong(name, function, dtype, d_head, device)
    return Timing(status="error", reason=wrong) if wrong else None


@cache
def why_wrong(name: str, function: AttentionFunction, dtype: str, d_head: int, device: torch.device) -> str:
    """What check_attention, a compiler or a launcher says against it; "" when all is well.

    Ours, and whatever the registry does not know, must be as near to float64 as check_attention demands;
    baselines need only be right by and large.
    """
    cases = [AttentionCase("whole tiles", (2,), 256, 256, d_head, is_causal=True)]
    strict = name == names.OURS or name not in names.ATTENTION
    if strict and dtype != "tf32":
        cases.append(AttentionCase("large scores", (8,), 128, 128, d_head, is_causal=True, logit_scale=30.0))
    allowed = None if strict else BASELINE_ERROR[names.torch_dtype(dtype)]
    allowed = TF32_ERROR if dtype == "tf32" else allowed

    def switched(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        with backend_of(name):  # not around the check itself, whose yardstick is PyTorch's choice
            return function(q, k, v, is_causal)

    how = {"dtype": names.torch_dtype(dtype), "device": device, "allowed_error": allowed}
    try:
        check_attention(switched, cases=cases, **how)
    except Exception as error:  # a wrong result, or whatever a compiler or a launcher raises
        return one_line(error)
    return ""
