"""Solutions of notebook 24's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "next_state": [
        """
def next_state(s, v, m, total, acc):
    m_new = torch.maximum(m, s.amax(-1))
    shrink = (m - m_new).exp()
    p = (s - m_new.unsqueeze(-1)).exp()
    return m_new, shrink * total + p.sum(-1), shrink.unsqueeze(-1) * acc + p @ v
""",
        """
def next_state(s, v, m, total, acc):
    largest = torch.cat([m[..., None], s], -1).amax(-1, keepdim=True)
    p = torch.exp(s - largest)
    old = torch.exp(m[..., None] - largest)
    return largest.squeeze(-1), old.squeeze(-1) * total + p.sum(-1), old * acc + p.matmul(v)
""",
    ],
    "attend_tile": [
        """
def attend_tile(q, k, v, first, is_causal, keys):
    behind = first + q.shape[-2]
    m = q.new_full(q.shape[:-1], torch.finfo(q.dtype).min)
    total = torch.zeros_like(m)
    acc = torch.zeros_like(q)
    end = min(k.shape[-2], behind) if is_causal else k.shape[-2]
    for start in range(0, end, keys):
        tile = slice(start, start + keys)
        s = q @ k[..., tile, :].mT / q.shape[-1] ** 0.5
        if is_causal:
            rows = torch.arange(first, behind, device=q.device)[:, None]
            places = torch.arange(start, start + s.shape[-1], device=q.device)
            s = s.masked_fill(places > rows, -torch.inf)
        m, total, acc = next_state(s, v[..., tile, :], m, total, acc)
    return acc / total[..., None], m + total.log()
""",
        """
def attend_tile(q, k, v, first, is_causal, keys):
    q = q / q.shape[-1] ** 0.5
    m = torch.full_like(q[..., 0], torch.finfo(q.dtype).min)
    state = m, torch.zeros_like(m), torch.zeros_like(q)
    left = 0
    for k_tile, v_tile in zip(k.split(keys, -2), v.split(keys, -2), strict=True):
        if is_causal and left >= first + q.shape[-2]:
            break
        s = torch.einsum("...qd,...kd->...qk", q, k_tile)
        if is_causal:
            seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril(first - left)
            s = s.where(seen, -torch.inf)
        state = next_state(s, v_tile, *state)
        left += keys
    m, total, acc = state
    return acc / total.unsqueeze(-1), m + torch.log(total)
""",
    ],
    "tile_product": [
        """
@triton.jit
def tile_product(a_ptr, b_ptr, rows, columns, inner, m, n, k):
    in_a = (rows[:, None] < m) & (inner < k)
    in_b = (columns[:, None] < n) & (inner < k)
    a = tl.load(a_ptr + rows[:, None] * k + inner, mask=in_a, other=0.0)
    b = tl.load(b_ptr + columns[:, None] * k + inner, mask=in_b, other=0.0)
    return tl.dot(a, tl.trans(b), input_precision="ieee")
""",
        """
@triton.jit
def tile_product(a_ptr, b_ptr, rows, columns, inner, m, n, k):
    down = inner[:, None]
    b_places = b_ptr + columns * k + down
    b = tl.load(b_places, mask=(columns < n) & (down < k), other=0.0)
    a_places = a_ptr + rows[:, None] * k + inner
    a = tl.load(a_places, mask=(rows[:, None] < m) & (inner < k), other=0.0)
    return tl.dot(a, b, input_precision="ieee" if a.dtype == tl.float32 else "tf32")
""",
    ],
    "visit_keys": [
        """
@triton.jit
def visit_keys(q, k, v, visible, m, total, acc, scale_log2):
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    s = tl.where(visible, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new > -float("inf"), m_new, 0.0)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(m - base)
    total = shrink * total + tl.sum(p, 1)
    acc = shrink[:, None] * acc + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m_new, total, acc
""",
        """
@triton.jit
def visit_keys(q, k, v, visible, m, total, acc, scale_log2):
    dots = tl.dot(q, k.T, input_precision="ieee")
    s = tl.where(visible, dots * scale_log2, -float("inf"))
    largest = tl.maximum(tl.max(s, axis=1), m)
    finite = tl.maximum(largest, -1e30)
    old = tl.exp2(m - finite)
    p = tl.exp2(s - finite[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return largest, total * old + tl.sum(p, axis=1), acc
""",
    ],
    "is_visible": [
        """
@triton.jit
def is_visible(rows, keys, n_keys, CAUSAL: tl.constexpr):
    visible = keys[None, :] < n_keys
    if CAUSAL:
        visible = visible & (keys[None, :] <= rows[:, None])
    return visible
""",
        """
@triton.jit
def is_visible(rows, keys, n_keys, CAUSAL: tl.constexpr):
    end = n_keys
    if CAUSAL:
        end = tl.minimum(rows[:, None] + 1, n_keys)
    return keys[None, :] < end
""",
    ],
    "attend": [
        """
@triton.jit
def attend(
    q, k_ptr, v_ptr, rows, n_keys, scale_log2,
    D: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):
    end = n_keys
    if CAUSAL:
        end = min(n_keys, tl.max(rows, 0) + 1)
    m = tl.full(rows.shape, -float("inf"), tl.float32)
    total = tl.zeros(rows.shape, tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_tile(k_ptr, keys, n_keys, D, COLUMNS)
        v = load_tile(v_ptr, keys, n_keys, D, COLUMNS)
        visible = is_visible(rows, keys, n_keys, CAUSAL)
        m, total, acc = visit_keys(q, k, v, visible, m, total, acc, scale_log2)
    return acc / total[:, None], (m + tl.log2(total)) * 0.6931471805599453
""",
        """
@triton.jit
def attend(
    q, k_ptr, v_ptr, rows, n_keys, scale_log2,
    D: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):
    m = tl.zeros(rows.shape, tl.float32) - float("inf")
    total = tl.zeros(rows.shape, tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    tiles = (n_keys + KEYS - 1) // KEYS
    if CAUSAL:
        tiles = min(tiles, tl.max(rows, 0) // KEYS + 1)
    for tile in range(0, tiles):
        keys = tile * KEYS + tl.arange(0, KEYS)
        visible = is_visible(rows, keys, n_keys, CAUSAL)
        k = load_tile(k_ptr, keys, n_keys, D, COLUMNS)
        v = load_tile(v_ptr, keys, n_keys, D, COLUMNS)
        m, total, acc = visit_keys(q, k, v, visible, m, total, acc, scale_log2)
    lse = m * 0.6931471805599453 + tl.log(total)
    return acc / total[:, None], lse
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "next_state": {
        "the old sum is not corrected": [("shrink * total", "total")],
        "the old output is not corrected": [("shrink.unsqueeze(-1) * acc", "acc")],
        "the tile's maximum only": [("torch.maximum(m, s.amax(-1))", "s.amax(-1)")],
        "one maximum for all rows": [("s.amax(-1)", "s.amax()")],
        "the old maximum in the tile's exponentials": [("(s - m_new.", "(s - m.")],
        "the logsumexp in place of the maximum": [("s.amax(-1)", "s.logsumexp(-1)")],
    },
    "attend_tile": {
        "never skips": [("min(k.shape[-2], behind) if is_causal else k", "k")],
        "all keys are one tile": [("    for start", "    keys = end\n    for start")],
        "rows counted from the tile's first": [("(first, behind,", "(0, q.shape[-2],")],
        "stops at the first row's key": [
            ("min(k.shape[-2], behind)", "min(k.shape[-2], first + 1)")
        ],
        "keys of an incomplete tile are left out": [
            ("(0, end, keys)", "(0, end - keys + 1, keys)")
        ],
        "keys counted from the tile's first": [
            ("arange(start, start + s.shape[-1],", "arange(s.shape[-1],")
        ],
        "the maximum starts at zero": [("torch.finfo(q.dtype).min", "0.0")],
    },
    "tile_product": {
        "no bound on the inner dimension": [
            ("in_a = (rows[:, None] < m) & (inner < k)", "in_a = rows[:, None] < m"),
            ("in_b = (columns[:, None] < n) & (inner < k)", "in_b = columns[:, None] < n"),
        ],
        "A is read beyond its last row": [("(rows[:, None] < m)", "(rows[:, None] >= 0)")],
        "B is not turned around": [("tl.trans(b)", "b")],
        "rows of B lie n apart": [("columns[:, None] * k", "columns[:, None] * n")],
        "returned in the operands' type": [('"ieee")', '"ieee").to(a.dtype)')],
        "what the mask leaves out is whatever a register held": [
            ("mask=in_b, other=0.0", "mask=in_b"),
        ],
    },
    "visit_keys": {
        "hidden scores count for the maximum": [
            ('    s = tl.where(visible, s, -float("inf"))\n', ""),
            ("    p =", '    s = tl.where(visible, s, -float("inf"))\n    p ='),
        ],
        "-inf minus -inf": [('tl.where(m_new > -float("inf"), m_new, 0.0)', "m_new")],
        "hidden scores are zero": [('(visible, s, -float("inf"))', "(visible, s, 0.0)")],
        "the sum of rounded exponentials": [
            ("tl.sum(p, 1)", "tl.sum(p.to(v.dtype).to(tl.float32), 1)")
        ],
        "the old sum is not corrected": [("shrink * total", "total")],
        "acc is rounded": [("_new, total, acc", "_new, total, acc.to(v.dtype).to(tl.float32)")],
        "the scale is rounded into q": [
            ("tl.dot(q, tl", "tl.dot((q * scale_log2).to(q.dtype), tl"),
            (") * scale_log2", ")"),
        ],
    },
    "is_visible": {
        "a row does not see its own key": [("<= rows", "< rows")],
        "rows see what comes after": [("<= rows", ">= rows")],
        "causal, keys beyond the last exist": [("visible & (keys", "(keys")],
        "one key too many": [("< n_keys", "<= n_keys")],
        "always causal": [("    if CAUSAL:\n        visible", "    visible")],
    },
    "attend": {
        "never skips": [("min(n_keys, tl.max(rows, 0) + 1)", "n_keys")],
        "divided in each tile": [
            (
                "    return acc / total[:, None]",
                "        acc = acc / total[:, None]\n    return acc",
            )
        ],
        "L to the base 2": [(" * 0.6931471805599453", "")],
        "stops at the first row's key": [("tl.max(rows, 0)", "tl.min(rows, 0)")],
        "keys of an incomplete tile are left out": [
            ("(0, end, KEYS)", "(0, end - KEYS + 1, KEYS)")
        ],
        "no mask in the diagonal's tiles": [("keys, n_keys, CAUSAL)", "keys, n_keys, False)")],
        "goes on beyond the last key": [
            ("min(n_keys, tl.max(rows, 0) + 1)", "tl.max(rows, 0) + 1")
        ],
        "acc is rounded after each tile": [
            (
                "scale_log2)\n    return",
                "scale_log2)\n        acc = acc.to(q.dtype).to(tl.float32)\n    return",
            )
        ],
    },
}
