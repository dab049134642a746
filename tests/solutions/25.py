"""Solutions of notebook 25's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "delta": [
        """
def delta(do, o):
    o = o.float()
    return torch.sum(do.float() * o, -1)
""",
        """
def delta(do, o):
    return torch.einsum("...d,...d->...", do.to(torch.float32), o.to(torch.float32))
""",
    ],
    "attention_backward": [
        """
def attention_backward(do, q, k, v, o, lse, is_causal=False):
    do32, q32, k32, v32 = do.float(), q.float(), k.float(), v.float()
    s = q32 @ k32.mT / q.shape[-1] ** 0.5
    if is_causal:
        rows = torch.arange(q.shape[-2], device=q.device)[:, None]
        keys = torch.arange(k.shape[-2], device=q.device)
        s = s.masked_fill(keys > rows, -torch.inf)
    p = (s - lse[..., None]).exp()
    ds = p * (do32 @ v32.mT - delta(do, o)[..., None])
    ds = ds / q.shape[-1] ** 0.5
    return (ds @ k32).to(q.dtype), (ds.mT @ q32).to(k.dtype), (p.mT @ do32).to(v.dtype)
""",
        """
def attention_backward(do, q, k, v, o, lse, is_causal=False):
    scale = q.shape[-1] ** -0.5
    scaled = q.float() * scale
    p = torch.exp(scaled @ k.float().mT - lse.unsqueeze(-1))
    if is_causal:
        p = p.tril()
    dp = torch.einsum("...qd,...kd->...qk", do.float(), v.float())
    ds = p * dp - p * delta(do, o).unsqueeze(-1)
    dq = scale * (ds @ k.float())
    dk = ds.mT @ scaled
    dv = p.mT @ do.float()
    return dq.type_as(q), dk.type_as(k), dv.type_as(v)
""",
    ],
    "tile_gradients": [
        """
@triton.jit
def tile_gradients(q, k, v, do, lse, delta, visible, scale):
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(visible, s, -float("inf"))
    p = tl.exp2((s - lse[:, None]) * 1.4426950408889634)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    return p, p * (dp - delta[:, None])
""",
        """
@triton.jit
def tile_gradients(q, k, v, do, lse, delta, visible, scale):
    dp = tl.trans(tl.dot(v, do.T, input_precision="ieee"))
    dots = tl.trans(tl.dot(k, q.T, input_precision="ieee"))
    power = dots * (scale * 1.4426950408889634) - (lse * 1.4426950408889634)[:, None]
    p = tl.exp2(tl.where(visible, power, -float("inf")))
    return p, p * dp - p * delta[:, None]
""",
    ],
    "sum_over_keys": [
        """
@triton.jit
def sum_over_keys(
    q, do, lse, delta, k_ptr, v_ptr, rows, n_keys, scale,
    D: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):
    end = n_keys
    if CAUSAL:
        end = min(n_keys, tl.max(rows, 0) + 1)
    dq = tl.zeros(q.shape, tl.float32)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_tile(k_ptr, keys, n_keys, D, COLUMNS)
        v = load_tile(v_ptr, keys, n_keys, D, COLUMNS)
        visible = is_visible(rows, keys, n_keys, CAUSAL)
        p, ds = tile_gradients(q, k, v, do, lse, delta, visible, scale)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    return dq * scale
""",
        """
@triton.jit
def sum_over_keys(
    q, do, lse, delta, k_ptr, v_ptr, rows, n_keys, scale,
    D: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):
    total = tl.zeros(q.shape, tl.float32)
    tiles = (n_keys + KEYS - 1) // KEYS
    if CAUSAL:
        tiles = min(tiles, tl.max(rows, 0) // KEYS + 1)
    for tile in range(0, tiles):
        keys = tile * KEYS + tl.arange(0, KEYS)
        v = load_tile(v_ptr, keys, n_keys, D, COLUMNS)
        k = load_tile(k_ptr, keys, n_keys, D, COLUMNS)
        seen = is_visible(rows, keys, n_keys, CAUSAL)
        _, ds = tile_gradients(q, k, v, do, lse, delta, seen, scale)
        total = tl.dot(ds.to(k.dtype), k, total, input_precision="ieee")
    return scale * total
""",
    ],
    "sum_over_queries": [
        """
@triton.jit
def sum_over_queries(
    k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, keys, n_queries, n_keys, scale,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
):
    begin = 0
    if CAUSAL:
        begin = tl.min(keys, 0)
    dk = tl.zeros(k.shape, tl.float32)
    dv = tl.zeros(v.shape, tl.float32)
    for start in range(begin, n_queries, ROWS):
        rows = start + tl.arange(0, ROWS)
        q, do, lse, delta = load_queries(
            q_ptr, do_ptr, lse_ptr, delta_ptr, rows, n_queries, D, COLUMNS
        )
        visible = is_visible(rows, keys, n_keys, CAUSAL)
        p, ds = tile_gradients(q, k, v, do, lse, delta, visible, scale)
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
        dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
    return dk * scale, dv
""",
        """
@triton.jit
def sum_over_queries(
    k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, keys, n_queries, n_keys, scale,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
):
    dv = tl.zeros(v.shape, tl.float32)
    dk = tl.zeros(k.shape, tl.float32)
    first = tl.min(keys, 0) // ROWS if CAUSAL else 0
    for tile in range(first, (n_queries + ROWS - 1) // ROWS):
        rows = tile * ROWS + tl.arange(0, ROWS)
        q, do, lse, d = load_queries(
            q_ptr, do_ptr, lse_ptr, delta_ptr, rows, n_queries, D, COLUMNS
        )
        seen = is_visible(rows, keys, n_keys, CAUSAL)
        p, ds = tile_gradients(q, k, v, do, lse, d, seen, scale)
        dv = tl.dot(p.to(do.dtype).T, do, dv, input_precision="ieee")
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision="ieee")
    return scale * dk, dv
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "delta": {
        "the product is rounded before it is added up": [
            ("    o = o.float()\n", ""),
            ("do.float() * o", "(do * o).float()"),
        ],
        "in the inputs' type": [("    o = o.float()\n", ""), ("do.float()", "do")],
        "the second of any dimensions": [("o, -1)", "o, 2)")],
        "the mean": [("torch.sum", "torch.mean")],
    },
    "attention_backward": {
        "without D": [(" - delta(do, o)[..., None]", "")],
        "the scale in the scores only": [("    ds = ds / q.shape[-1] ** 0.5\n", "")],
        "the mask ends at the last key": [
            ("keys > rows", "keys > rows + k.shape[-2] - q.shape[-2]"),
        ],
        "hidden scores are zero": [("-torch.inf", "0.0")],
        "the scores are rounded": [("q32 @ k32.mT", "(q @ k.mT).float()")],
        "a gradient stays float32": [("(ds.mT @ q32).to(k.dtype)", "ds.mT @ q32")],
        "a softmax in place of L": [("(s - lse[..., None]).exp()", "s.softmax(-1)")],
        "P is rounded": [("(p.mT @", "(p.to(v.dtype).float().mT @")],
    },
    "tile_gradients": {
        "the power of e without its factor": [(" * 1.4426950408889634", "")],
        "hidden scores are zero": [('-float("inf")', "0.0")],
        "the scale in dS as well": [
            ("p * (dp - delta[:, None])", "p * (dp - delta[:, None]) * scale")
        ],
        "L by key": [("lse[:, None]", "lse[None, :]")],
        "D by key": [("delta[:, None]", "delta[None, :]")],
    },
    "sum_over_keys": {
        "never skips": [("min(n_keys, tl.max(rows, 0) + 1)", "n_keys")],
        "without the scale": [("dq * scale", "dq")],
        "stops at the first row's key": [("tl.max(rows, 0)", "tl.min(rows, 0)")],
        "keys of an incomplete tile are left out": [
            ("(0, end, KEYS)", "(0, end - KEYS + 1, KEYS)")
        ],
        "no mask in the diagonal's tiles": [("keys, n_keys, CAUSAL)", "keys, n_keys, False)")],
        "goes on beyond the last key": [
            ("min(n_keys, tl.max(rows, 0) + 1)", "tl.max(rows, 0) + 1")
        ],
        "each tile's product is rounded": [('"ieee")\n', '"ieee").to(k.dtype)\n')],
    },
    "sum_over_queries": {
        "never skips": [("tl.min(keys, 0)", "0")],
        "without the scale": [("dk * scale", "dk")],
        "begins at the last key's query": [("tl.min(keys, 0)", "tl.max(keys, 0)")],
        "as many queries as keys": [("(begin, n_queries, ROWS)", "(begin, n_keys, ROWS)")],
        "queries of an incomplete tile are left out": [
            ("(begin, n_queries, ROWS)", "(begin, n_queries - ROWS + 1, ROWS)")
        ],
        "the sum is rounded": [("        dv +=", "        dv = dv.to(do.dtype)\n        dv +=")],
        "begins with a whole tile": [("tl.min(keys, 0)", "tl.cdiv(tl.min(keys, 0), ROWS) * ROWS")],
        "goes on behind the last query": [("(begin, n_queries,", "(begin, n_queries + ROWS,")],
    },
}
