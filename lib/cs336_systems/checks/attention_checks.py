"""What "correct" means for an attention function, ours or the one you wrote.

The reference for errors is PyTorch's SDPA, see `accuracy`, except for 16-bit tensors on a CPU: there SDPA
computes in float32 throughout, so the formula, rounded at every step, takes its place.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch

from cs336_systems.attention.baselines import sdpa, torch_softmax
from cs336_systems.attention.inputs import AttentionFunction
from cs336_systems.checks.accuracy import EPS, Device, Reference, Trial, compare, random_on
from cs336_systems.checks.exercise import assert_tensor


@dataclass(frozen=True)
class AttentionCase:
    """One set of random inputs: q (*leading, n_queries, d), k and v (*leading, n_keys, d)."""

    name: str
    leading: tuple[int, ...] = (3,)
    n_queries: int = 128
    n_keys: int = 128
    d: int = 64
    is_causal: bool = False
    logit_scale: float = 1.0  # q is multiplied by it: 1 gives scores of unit variance
    transposed: bool = False  # q, k and v lie in memory as the heads of a model do, token by token


# What the handout asks for: one batch dimension, lengths and head sizes that are powers of two.
BASIC = (
    AttentionCase("full"),
    AttentionCase("causal", is_causal=True),
    AttentionCase("twice as many keys", n_keys=256, transposed=True),
    AttentionCase("causal, twice as many keys", n_keys=256, is_causal=True, transposed=True),
    AttentionCase("large scores", is_causal=True, logit_scale=30.0),
)


@np.errstate(all="ignore")  # Triton's interpreter is NumPy, which warns of overflow
def check_attention(
    attention: AttentionFunction,
    *,
    cases: Iterable[AttentionCase] = BASIC,
    dtype: torch.dtype = torch.float32,
    device: Device | None = None,
    backward: bool = True,
    allowed_error: float | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare an attention function and its gradients with float64, in all else as `check_weighted_sum`.

    Args:
        attention: called as attention(q, k, v, is_causal), returns O (..., n_queries, d).
        cases: BASIC, or your own.
        backward: check dQ, dK and dV too.
        allowed_error: relative, instead of twice PyTorch's own, for arithmetic such as TF32.
    """
    generator = random_on(device, seed)
    lines = []
    for case in cases:
        *qkv, d_output = _random_inputs(case, generator, dtype)
        inputs = {name: x.requires_grad_(backward) for name, x in zip("QKV", qkv, strict=True)}
        half_on_cpu = generator.device.type == "cpu" and dtype.itemsize == 2
        # A large score's last bit is exponentiated, and NumPy may round QK^T and KQ^T differently.
        reference = Reference(
            partial(torch_softmax, is_causal=case.is_causal),
            torchs_own=None if half_on_cpu else partial(sdpa, is_causal=case.is_causal),
            rounding=2 * max(1, case.logit_scale) * EPS,
        )
        trial = Trial(inputs, d_output, f"case {case.name!r}", "O")
        compared = compare(
            lambda q, k, v, case=case: attention(q, k, v, case.is_causal),
            trial,
            reference,
            allowed_error=allowed_error,
            diagnose=_diagnose,
        )
        lines += [{"case": case.name} | line for line in compared]
    return pd.DataFrame(lines)


def check_logsumexp(
    attention: AttentionFunction, device: Device | None = None, dtype=torch.float32
):
    """The forward keeps exactly one tensor of shape (..., n_queries) for its backward: each row's logsumexp.

    Raises AssertionError: it keeps none or several, or numbers that are no natural logarithms of row sums.
    """
    case = AttentionCase("logsumexp", leading=(2,), n_queries=96, n_keys=128)
    q, k, v, _ = _random_inputs(case, random_on(device, 0), dtype)
    output = attention(q.requires_grad_(), k, v, True)
    assert_tensor("O", output, q)
    rows = output.shape[:-1]
    kept = getattr(output.grad_fn, "saved_tensors", ())
    saved = [x for x in kept if x is not None and x.shape == rows]
    assert len(saved) == 1, f"{len(saved)} saved tensors have shape {tuple(rows)}; wanted: one"
    scores = q.double() @ k.double().mT / case.d**0.5
    hidden = torch.full_like(scores, -torch.inf).triu(1)
    exact = (scores + hidden).logsumexp(-1)
    error = (saved[0].double() - exact).abs().max().item()
    assert error < 1e-4, f"L is off by {error:.2g}; wanted: a natural logarithm, of float32 sums"


def _random_inputs(case, generator, dtype):
    lengths = (case.n_queries, case.n_keys, case.n_keys, case.n_queries)
    q, k, v, do = (
        torch.randn(*case.leading, n, case.d, generator=generator, device=generator.device)
        for n in lengths
    )
    q *= case.logit_scale
    if case.transposed:
        q, k, v = (x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in (q, k, v))
    return [x.to(dtype) for x in (q, k, v, do)]


def _diagnose(ours, error):
    """The usual reason for an error of this kind."""
    if not ours.isfinite().all():
        return ". It is not finite: is the maximum subtracted, a score hidden before exp, and all written?"
    if ours.dtype == torch.float32 and 1e-4 < error < 3e-3:
        return ". TF32 is off by so much: float32 needs input_precision='ieee' in tl.dot on a GPU"
    return ""
