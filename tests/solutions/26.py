"""Solutions of notebook 26's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "cold_times": [
        """
def cold_times(run, flush, tick, tensors=(), warmup=2, repetitions=5):
    times = []
    for _ in range(warmup + repetitions):
        for x in tensors:
            x.grad = None
        flush()
        start = tick()
        run()
        times.append(tick() - start)
    return times[warmup:]
""",
        """
def cold_times(run, flush, tick, tensors=(), warmup=2, repetitions=5):
    def once():
        for x in tensors:
            x.grad = None
        flush()
        begin = tick()
        run()
        return tick() - begin

    for _ in range(warmup):
        once()
    return [once() for _ in range(repetitions)]
""",
    ],
    "host_bound": [
        """
def host_bound(passes):
    alone = passes["forward"] + passes["backward"]
    off = (alone / passes["forward_backward"] - 1).abs() > 0.2
    return off[::-1].cummax()[::-1]
""",
        """
def host_bound(passes):
    both = passes["forward_backward"]
    off = abs(passes["forward"] + passes["backward"] - both) > both / 5
    return off.sort_index(ascending=False).cummax()
""",
    ],
    "rows_and_registers": [
        """
def rows_and_registers(kernel, queries, keys, warps, d=64):
    rows = min(queries, keys) if kernel == "dkdv" else queries
    scores = {"forward": 1, "dq": 2, "dkdv": 2}[kernel] * queries * keys
    outputs = {"forward": queries, "dq": queries, "dkdv": 2 * keys}[kernel] * d
    return rows, (scores + outputs) // (32 * warps)
""",
        """
def rows_and_registers(kernel, queries, keys, warps, d=64):
    rows, numbers = queries, queries * (keys + d)
    if kernel == "dq":
        numbers = queries * (2 * keys + d)
    elif kernel == "dkdv":
        rows, numbers = min(queries, keys), 2 * keys * (queries + d)
    return rows, numbers // 32 // warps
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "cold_times": {
        "gradients are zeroed": [("x.grad = None", "x.grad = torch.zeros_like(x)")],
        "dropped after the run only": [
            ("        for x in tensors:\n            x.grad = None\n", ""),
            (" - start)\n", " - start)\n        for x in tensors:\n            x.grad = None\n"),
        ],
        "the flush is timed": [
            ("        flush()\n        start = tick()", "        start = tick()\n        flush()")
        ],
        "only the first tensor's": [("in tensors", "in tensors[:1]")],
        "the times sorted": [("return times[warmup:]", "return sorted(times[warmup:])")],
        "always two of warm-up": [("times[warmup:]", "times[2:]"), ("(warmup", "(2")],
    },
    "host_bound": {
        "only a longer sum": [(".abs()", "")],
        "each length by itself": [("off[::-1].cummax()[::-1]", "off")],
        "what is longer, too": [("off[::-1].cummax()[::-1]", "off.cummax()")],
        "up to the first that adds up": [("off[::-1].cummax()[::-1]", "off.cummin()")],
        "a fifth of a ms": [
            ('alone / passes["forward_backward"] - 1', 'alone - passes["forward_backward"]')
        ],
    },
    "rows_and_registers": {
        "dkdv: queries alone": [('min(queries, keys) if kernel == "dkdv" else queries', "queries")],
        "dK or dV": [("2 * keys}", "keys}")],
        "rows of four warps": [("return rows,", "return rows * 4 // warps,")],
        "always four warps": [("(32 * warps)", "128")],
        "always 64 wide": [("[kernel] * d", "[kernel] * 64")],
    },
}
