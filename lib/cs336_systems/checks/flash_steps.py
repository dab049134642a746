"""The steps of writing FlashAttention in Triton: their properties, and the usual reason where one fails.

The kernels here only carry tensors to the functions that are being written, and back.
"""

import torch
import triton
import triton.language as tl

from cs336_systems.checks.accuracy import random_on
from cs336_systems.checks.attention_checks import AttentionCase, check_attention, check_logsumexp

_LOG2_E = 1.4426950408889634


def _random_tiles(count, device):
    """Of 16 by 16: no inner side of 16-bit operands of tl.dot is shorter."""
    return torch.randn(count, 16, 16, generator=random_on(device, 0), device=device)


@triton.jit
def _visit_kernel(
    q_ptr, k_ptr, v_ptr, visible_ptr, o_ptr, total_ptr, scale_log2, tiles, visit: tl.constexpr
):
    rows = tl.arange(0, 16)
    square = rows[:, None] * 16 + rows
    q = tl.load(q_ptr + square)
    m = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, 16], tl.float32)
    for tile in range(tiles):
        place = tile * 256 + square
        k = tl.load(k_ptr + place)
        v = tl.load(v_ptr + place)
        visible = tl.load(visible_ptr + place) != 0
        m, total, acc = visit(q, k, v, visible, m, total, acc, scale_log2)
    tl.store(o_ptr + square, acc / total[:, None])
    # Both in one number: a wrong one of them shows, too.
    tl.store(total_ptr + rows, m + total)


def check_visit(check, visit, device):
    """Properties of `visit(q, k, v, visible, m, total, acc, scale_log2)`, one tile of the online softmax.

    It takes q, k, v (16, 16), visible (16, 16) of bool, m and total (16,), acc (16, 16), and returns the new
    m, total and acc. scale_log2 is the scale of the scores times log2(e): exponentials are powers of two.
    """

    def agrees(tiles, scale=0.25, hidden=slice(0), shift=0.0):
        """hidden: an index of (tiles, rows, keys), of none by default. shift: of all scores, unscaled."""
        q, k, v = _random_tiles(1 + 2 * tiles, device).split((1, tiles, tiles))
        q[..., 0] = shift
        k[..., 0] = 1.0
        visible = torch.ones_like(k)
        visible[hidden] = 0
        output = torch.full_like(q[0], torch.nan)
        # The copy of q is for m + total, at which nobody looks here.
        _visit_kernel[1,](q, k, v, visible, output, q.clone(), scale * _LOG2_E, tiles, visit)
        scores = (scale * q @ k.mT).masked_fill(visible == 0, -torch.inf)
        weights = scores.movedim(0, 1).flatten(1).softmax(-1)
        # A maximum that is not the scores' own gives the same output, if sum and output share it.
        return torch.allclose(output, weights @ v.flatten(0, 1), 1e-3, 1e-4)

    check("one tile is a softmax", agrees(1), "p = exp2(s * scale_log2 - m_new); no TF32")
    check(
        "each further tile corrects the sums",
        agrees(5, 2.0),
        "do total and acc both shrink by exp2(m - m_new)?",
    )
    # Of the last tile, for all rows, all but the first.
    keys = (-1, slice(None), slice(1, None))
    check(
        "hidden keys weigh nothing",
        agrees(2, hidden=keys) and agrees(2, 100.0, keys),
        "are they -inf before the maximum?",
    )
    check(
        "large scores stay finite",
        agrees(2, 100.0),
        "is each row's maximum subtracted before exp2?",
    )
    check(
        "a first tile may be hidden",
        agrees(2, hidden=0, shift=-500.0),
        "exp2(-inf - -inf) is NaN: while m is -inf subtract 0, but return -inf",
    )
    _check_float32(check, visit, device)


def _check_float32(check, visit, device):
    """With inputs of bfloat16."""
    q, k, v = _random_tiles(3, device).bfloat16()
    seen = torch.ones_like(q)
    # Copies, for what the kernel writes: the output, and m + total.
    output = q.float()
    total = q[0].float()
    _visit_kernel[1,](q, k, v, seen, output, total, 1.5, 1, visit)
    # Transposed, a column for each query, so that m is a row.
    scores = 1.5 * k.float() @ q.float().T
    m = scores.amax(0)
    wanted = m + (scores - m).exp2().sum(0)
    check(
        "m and total stay float32",
        torch.allclose(total, wanted, 1e-4),
        "round neither q * scale, nor s, m, or p before it is added up; m is the largest s * scale_log2",
    )
    v.fill_(1)
    v[0] = 256  # with the others 271, which bfloat16 does not have
    _visit_kernel[1,](0 * q, k, v, seen, output, total, 1.0, 1, visit)
    check("acc stays float32", (output == 271 / 16).all(), "p is rounded, nothing else")


@triton.jit
def _mask_kernel(seen_ptr, row, key, n_keys, visible: tl.constexpr, CAUSAL: tl.constexpr):
    places = tl.arange(0, 16)
    column = places[:, None]
    # A mask of one row, without CAUSAL, is broadcast to (16, 16).
    seen = visible(row + places, key + places, n_keys, CAUSAL) & (column >= 0)
    tl.store(seen_ptr + column * 16 + places, seen.to(tl.int32))


def check_mask(check, visible, device):
    """Properties of `visible(rows, keys, n_keys, CAUSAL)`: true where a row may see a key."""

    def agrees(first_row, first_key, n_keys, causal):
        places = torch.arange(16, device=device)
        rows = first_row + places[:, None]
        keys = first_key + places
        seen = torch.full_like(rows + keys, -1)
        _mask_kernel[1,](seen, first_row, first_key, n_keys, visible, causal)
        wanted = (keys < n_keys) & ((rows >= keys) | (not causal))
        return torch.equal(seen.bool(), wanted)

    check("keys beyond the last are hidden", agrees(0, 16, 20, False), "keys < n_keys")
    check(
        "otherwise every key is seen",
        agrees(0, 0, 64, False),
        "without CAUSAL nothing else is hidden",
    )
    check("causal: no key after the row", agrees(16, 16, 64, True), "a row sees itself")
    check("causal: every key before the row", agrees(48, 16, 64, True), "the other way round?")
    check("both at once", agrees(16, 16, 20, True), "the two conditions with &")


@triton.jit
def _gradients_kernel(
    tiles_ptr, visible_ptr, lse_ptr, delta_ptr, p_ptr, ds_ptr, scale, gradients: tl.constexpr
):
    rows = tl.arange(0, 16)
    square = rows[:, None] * 16 + rows
    q = tl.load(tiles_ptr + square)
    k = tl.load(tiles_ptr + 256 + square)
    v = tl.load(tiles_ptr + 512 + square)
    do = tl.load(tiles_ptr + 768 + square)
    lse = tl.load(lse_ptr + rows)
    delta = tl.load(delta_ptr + rows)
    visible = tl.load(visible_ptr + square) != 0
    p, ds = gradients(q, k, v, do, lse, delta, visible, scale)
    tl.store(p_ptr + square, p)
    tl.store(ds_ptr + square, ds)


def check_gradients(check, gradients, device):
    """Properties of `gradients(q, k, v, do, lse, delta, visible, scale)`, one tile of the backward pass.

    q, k, v, do (16, 16), lse, delta (16,), visible (16, 16) of bool -> P, dS (16, 16); S = scale * q k^T.
    """
    for dtype in (torch.float32, torch.bfloat16):
        tiles = _random_tiles(4, device).to(dtype)
        # The last key is hidden from all rows but the last, and its scores' exponentials overflow.
        tiles[0, :, 0] = 1.0
        tiles[1, -1, 0] = 1e3
        q, k, v, do = tiles.float()
        seen = torch.ones_like(q).tril() > 0
        scores = (0.3 * q @ k.T).masked_fill(~seen, -torch.inf).requires_grad_()
        weights = scores.softmax(-1)
        output = weights @ v
        (d_scores,) = torch.autograd.grad(output, scores, do)
        lse = scores.detach().logsumexp(-1)
        delta = (do * output.detach()).sum(-1)
        p = torch.full_like(q, torch.nan)
        ds = torch.full_like(q, torch.nan)
        _gradients_kernel[1,](tiles, seen.float(), lse, delta, p, ds, 0.3, gradients)

        check(
            f"P = exp(S - L), from {dtype}",
            torch.allclose(p[seen], weights[seen], 1e-3, 1e-5),
            "is s scaled, after tl.dot; log2(e) in exp2; ieee?",
        )
        check("hidden scores have none", not p[~seen].any(), "is a hidden score -inf before exp2?")
        check(
            "dS is its derivative",
            torch.allclose(ds, d_scores, 1e-3, 1e-4),
            "p * (dp - delta), dp = dO V^T, all in float32",
        )


# Each a property, by its name.
_CASES = (
    AttentionCase("agrees with attention in float64", (1,), 16, 16, 16),
    AttentionCase("over all tiles and sequences", (2,), 64, 128, 32),
    AttentionCase("lengths that no tile divides", (2,), 33, 65, 24),
    AttentionCase("large scores", (2,), 64, 64, 32, logit_scale=30.0),
    AttentionCase("causal", (2,), 65, 33, 16, is_causal=True),
    AttentionCase("heads side by side", (2, 2), 33, 33, 16, is_causal=True, transposed=True),
)


def check_forward(check, attention, device="cpu"):
    """Properties of the forward of `attention(q, k, v, is_causal)`, and of the logsumexp that it keeps."""
    _show_cases(check, attention, device, backward=False)
    q = _random_tiles(1, device)[:, :1]
    o = attention(q, -999 * q, q, False)
    check("scores far below zero", torch.allclose(o, q), "does m start at the least number?")


def check_backward(check, attention, device="cpu"):
    """Those of the forward, and the gradients, in 16 bits too."""
    _show_cases(check, attention, device)
    _show(
        check,
        "16 bits",
        check_attention,
        attention,
        cases=_CASES[:1],
        dtype=torch.half,
        device=device,
    )


def _show_cases(check, attention, device, **options):
    _show(check, "keeps one logsumexp a row", check_logsumexp, attention, device=device)
    for case in _CASES:
        _show(check, case.name, check_attention, attention, cases=[case], device=device, **options)


def _show(check, name, assert_right, attention, **options):
    """Show a property: it holds unless an AssertionError says what is wrong."""
    mistake = ""
    try:
        assert_right(attention, **options)
    except AssertionError as error:
        mistake = str(error)
    check(name, not mistake, mistake)
