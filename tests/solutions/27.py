"""Solutions of notebook 27's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "visit_keys": [
        """
@triton.jit
def visit_keys(q, k, v, rows, n, tile, scale, D, ROWS, KEYS, SKIP, PEEL, EXP2):
    m = tl.full([ROWS], -1e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    end = min(n, (tile + 1) * ROWS) if SKIP else n
    masked = 0
    if PEEL:
        masked = (tile * ROWS + 1) // KEYS * KEYS
        m, total, acc = visit_tiles(
            q, k, v, rows, n, 0, masked, m, total, acc, scale, D, KEYS, False, EXP2
        )
    return visit_tiles(q, k, v, rows, n, masked, end, m, total, acc, scale, D, KEYS, True, EXP2)
""",
        """
@triton.jit
def visit_keys(q, k, v, rows, n, tile, scale, D, ROWS, KEYS, SKIP, PEEL, EXP2):
    m = tl.full([ROWS], -1e38, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    end = min(n, (tile + 1) * ROWS) if SKIP else n
    masked = 0
    if PEEL:
        first = tile * ROWS
        masked = first - first % KEYS
        m, l, acc = visit_tiles(
            q, k, v, rows, n, 0, masked, m, l, acc, scale, D, KEYS, False, EXP2
        )
    return visit_tiles(q, k, v, rows, n, masked, end, m, l, acc, scale, D, KEYS, True, EXP2)
""",
    ],
    "faults_found": [
        """
def faults_found():
    return dict(
        A="dP without delta",
        B="off-by-one end",
        C="missing rescale",
        D="unmasked store",
        E="mixed batches",
        F="stale mask",
    )
""",
        """
def faults_found():
    names = ["dP without delta", "off-by-one end", "missing rescale"]
    names += ["unmasked store", "mixed batches", "stale mask"]
    return dict(zip("ABCDEF", names))
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "visit_keys": {
        "still masked": [("KEYS, False, EXP2", "KEYS, True, EXP2")],
        "the diagonal's tile, too": [("(tile * ROWS + 1) //", "(tile + 1) * ROWS //")],
        "not rounded": [("(tile * ROWS + 1) // KEYS * KEYS", "tile * ROWS")],
        "rounded up": [("(tile * ROWS + 1) // KEYS", "tl.cdiv(tile * ROWS, KEYS)")],
        "one tile too few": [
            ("(tile * ROWS + 1) // KEYS * KEYS", "max(tile * ROWS // KEYS - 1, 0) * KEYS")
        ],
    },
    "faults_found": {
        "65 and 77 tokens mixed up": [
            ("off-by-one end", "unmasked store"),
            ('D="unmasked store"', 'D="off-by-one end"'),
        ],
        "C and F mixed up": [
            ("missing rescale", "stale mask"),
            ('F="stale mask"', 'F="missing rescale"'),
        ],
        "D and E mixed up": [
            ("unmasked store", "mixed batches"),
            ('E="mixed batches"', 'E="unmasked store"'),
        ],
        "one name twice": [("stale mask", "missing rescale")],
    },
}
