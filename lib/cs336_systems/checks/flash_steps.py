"""The steps of writing FlashAttention in Triton: their properties, and the usual reason where one fails.

The kernels here only carry tensors to the functions that are being written, and back.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from cs336_systems.attention.inputs import AttentionFunction
from cs336_systems.checks.attention_checks import AttentionCase, check_attention, check_logsumexp
from cs336_systems.checks.exercise import StepCheck

_TILE, _LOG2_E = 16, 1.4426950408889634  # tl.dot takes 16 at least


@triton.jit
def _visit_kernel(
    q_ptr, k_ptr, v_ptr, visible_ptr, o_ptr, scale_log2,
    visit: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, N)
    square = rows[:, None] * N + rows
    q = tl.load(q_ptr + square)
    m = tl.full([N], -float("inf"), tl.float32)
    total, acc = tl.zeros([N], tl.float32), tl.zeros([N, N], tl.float32)
    for tile in range(TILES):
        place = tile * N * N + square
        k, v, visible = (
            tl.load(k_ptr + place),
            tl.load(v_ptr + place),
            tl.load(visible_ptr + place) != 0,
        )
        m, total, acc = visit(q, k, v, visible, m, total, acc, scale_log2)
    tl.store(o_ptr + square, acc / total[:, None])


def check_visit(check: StepCheck, visit: JITFunction, device: str | torch.device = "cpu") -> None:
    """Properties of `visit(q, k, v, visible, m, total, acc, scale_log2)`, one tile of the online softmax.

    It takes q, k, v (16, 16), visible (16, 16) of bool, m and total (16,), acc (16, 16), and returns the new
    m, total and acc. scale_log2 is the scale of the scores times log2(e): exponentials are powers of two.
    """

    def agrees(
        tiles: int, scale: float = 0.25, hide: slice | None = None, hidden: int = -1
    ) -> bool:
        q, k, v = (torch.randn(n, _TILE, _TILE, device=device).float() for n in (1, tiles, tiles))
        visible = torch.ones(tiles, _TILE, _TILE, dtype=torch.int32, device=device)
        if hide:
            visible[hidden, :, hide] = 0
        output = torch.full_like(q[0], torch.nan)
        _visit_kernel[1,](q, k, v, visible, output, scale * _LOG2_E, visit, tiles, _TILE)
        scores = (scale * q @ k.mT).masked_fill(visible == 0, -torch.inf).movedim(0, 1).flatten(1)
        wanted = scores.softmax(-1) @ v.flatten(0, 1)
        # A maximum that is not the scores' own gives the same output, if sum and output share it.
        return torch.allclose(output, wanted, rtol=1e-3, atol=1e-4)

    together = "do total and acc both shrink by exp2(m - m_new)?"
    check("one tile is a softmax", agrees(1), "p = exp2(s * scale_log2 - m_new)")
    check("a second tile corrects the first", agrees(2), together)
    check("so do all that follow", agrees(5, 2.0), together)
    check("hidden keys weigh nothing", agrees(2, hide=slice(1, None)), "is a hidden score -inf?")
    check(
        "large scores stay finite",
        agrees(2, 100.0),
        "is each row's maximum subtracted before exp2?",
    )
    hint = "exp2(-inf - -inf) is NaN: while the maximum is -inf, subtract 0"
    check("a first tile may be hidden", agrees(2, hide=slice(None), hidden=0), hint)


@triton.jit
def _mask_kernel(
    seen_ptr, row, key, n_keys, visible: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr
):
    rows, keys = tl.arange(0, N), tl.arange(0, N)
    seen = visible(row + rows, key + keys, n_keys, CAUSAL) & (rows[:, None] >= 0)  # (N, N)
    tl.store(seen_ptr + rows[:, None] * N + keys, seen.to(tl.int32))


def check_mask(check: StepCheck, visible: JITFunction, device: str | torch.device = "cpu") -> None:
    """Properties of `visible(rows, keys, n_keys, CAUSAL)`: true where a row may see a key."""

    def agrees(first_row: int, first_key: int, n_keys: int, causal: bool) -> bool:
        found = torch.full((_TILE, _TILE), -1, dtype=torch.int32, device=device)
        _mask_kernel[1,](found, first_row, first_key, n_keys, visible, causal, _TILE)
        rows = first_row + torch.arange(_TILE, device=device)[:, None]
        keys = first_key + torch.arange(_TILE, device=device)
        return bool((found.bool() == ((keys < n_keys) & ((rows >= keys) | (not causal)))).all())

    check("keys beyond the last are hidden", agrees(0, 16, 20, False), "keys < n_keys")
    check(
        "otherwise every key is seen",
        agrees(0, 0, 64, False),
        "without CAUSAL nothing else is hidden",
    )
    check(
        "causal: no key after the row",
        agrees(16, 16, 64, True),
        "rows[:, None] >= keys: it sees itself",
    )
    check(
        "causal: every key before the row", agrees(48, 16, 64, True), "is it the other way round?"
    )
    check("both at once", agrees(16, 16, 20, True), "the two conditions with &")


@triton.jit
def _gradients_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, visible_ptr, lse_ptr, delta_ptr, p_ptr, ds_ptr, scale,
    gradients: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, N)
    square = rows[:, None] * N + rows
    q, k = tl.load(q_ptr + square), tl.load(k_ptr + square)
    v, do = tl.load(v_ptr + square), tl.load(do_ptr + square)
    lse, delta = tl.load(lse_ptr + rows), tl.load(delta_ptr + rows)
    p, ds = gradients(q, k, v, do, lse, delta, tl.load(visible_ptr + square) != 0, scale)
    tl.store(p_ptr + square, p)
    tl.store(ds_ptr + square, ds)


def check_gradients(
    check: StepCheck, gradients: JITFunction, device: str | torch.device = "cpu"
) -> None:
    """Properties of `gradients(q, k, v, do, lse, delta, visible, scale)`, one tile of the backward pass.

    q, k, v, do (16, 16), lse, delta (16,), visible (16, 16) of bool -> P, dS (16, 16); S = scale * q k^T.
    """
    q, k, v, do = torch.randn(4, _TILE, _TILE, device=device, dtype=torch.float32)
    q[:, 0], k[-1, 0] = 1.0, 1e3  # hidden from all rows but the last: its exponentials overflow
    seen = torch.ones(_TILE, _TILE, dtype=torch.bool, device=device).tril()
    scores = (0.25 * q @ k.T).masked_fill(~seen, -torch.inf).requires_grad_()
    wanted_p = scores.softmax(-1)
    (wanted_ds,) = torch.autograd.grad(wanted_p @ v, scores, do)
    lse, delta = scores.detach().logsumexp(-1), (do * (wanted_p.detach() @ v)).sum(-1)
    p, ds = torch.full((2, _TILE, _TILE), torch.nan, device=device, dtype=torch.float32)
    _gradients_kernel[1,](q, k, v, do, seen.int(), lse, delta, p, ds, 0.25, gradients, _TILE)
    check(
        "P = exp(S - L)",
        torch.allclose(p[seen], wanted_p[seen], 1e-3, 1e-5),
        "scaled s, log2(e) in exp2?",
    )
    check("hidden scores have none", not p[~seen].any(), "is a hidden score -inf before exp2?")
    check(
        "dS is its derivative",
        torch.allclose(ds, wanted_ds, 1e-3, 1e-4),
        "p * (dp - delta), dp = dO V^T",
    )


_FORWARD = (  # each a property, by its name
    AttentionCase("agrees with attention in float64", (1,), 16, 16, 16),
    AttentionCase("over many tiles", (1,), 64, 128, 32),
    AttentionCase("each sequence sees its own keys", (3,), 32, 48, 16, transposed=True),
    AttentionCase("lengths that no tile divides", (2,), 45, 77, 16),
    AttentionCase("heads that are no power of two", (2,), 32, 32, 24),
    AttentionCase("large scores", (2,), 64, 64, 32, logit_scale=30.0),
    AttentionCase("causal", (2,), 64, 64, 16, is_causal=True),
    AttentionCase("causal, odd lengths", (2,), 77, 50, 16, is_causal=True),
)
_BACKWARD = (
    AttentionCase("dQ, dK and dV agree with float64", (1,), 16, 16, 16),
    AttentionCase("sums go over all tiles", (2,), 64, 128, 32, transposed=True),
    AttentionCase("lengths that no tile divides", (2,), 45, 77, 24),
    AttentionCase("large scores", (2,), 64, 64, 32, logit_scale=30.0, scores_by_matmul=True),
    AttentionCase("causal", (2,), 77, 50, 16, is_causal=True),
)


def check_forward(
    check: StepCheck, attention: AttentionFunction, device: str | torch.device = "cpu"
) -> None:
    """Properties of `attention(q, k, v, is_causal)`, forward only."""
    for case in _FORWARD:
        _tell(
            check,
            case.name,
            check_attention,
            attention,
            cases=[case],
            device=device,
            backward=False,
        )
    surrounded = torch.full((3, 4, 2 * 50 * 16), torch.nan, device=device, dtype=torch.float32)
    inside = (
        attention(*(x[1].view(2, 50, 16).normal_() for x in surrounded), False).isfinite().all()
    )
    hint = "NaN from outside the tensors came in: does every load have a mask, with other=0.0?"
    check("reads nothing out of bounds", inside, hint)
    case = AttentionCase("a first tile may weigh nothing", (1,), 16, 400, 16, n_padding=260)
    _tell(
        check.note,
        case.name,
        check_attention,
        attention,
        cases=[case],
        device=device,
        backward=False,
    )


def check_backward(
    check: StepCheck, attention: AttentionFunction, device: str | torch.device = "cpu"
) -> None:
    """Properties of the gradients of `attention(q, k, v, is_causal)`, and of the logsumexp kept for them."""
    _tell(check, "keeps one logsumexp a row", check_logsumexp, attention, device=device)
    for case in _BACKWARD:
        _tell(check, case.name, check_attention, attention, cases=[case], device=device)
    _tell(
        check,
        "16 bits",
        check_attention,
        attention,
        cases=_BACKWARD[:1],
        dtype=torch.half,
        device=device,
    )


def _tell(
    show: Callable, name: str, checked: Callable, attention: AttentionFunction, **how: Any
) -> None:
    """Show a property: it holds unless `checked` says what is wrong."""
    try:
        checked(attention, **how)
        mistake = ""
    except AssertionError as error:
        mistake = str(error)
    show(name, not mistake, mistake)
