"""Solutions of notebook 16's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "segments": [
        """
def segments(blocks, k):
    plan = []
    for start in range(0, len(blocks), k):
        plan.append(tuple(blocks[start : start + k]))
    return tuple(plan)
""",
        """
def segments(blocks, k):
    if len(blocks) == 0:
        return ()
    return tuple(blocks[:k]), *segments(blocks[k:], k)
""",
    ],
    "halves": [
        """
def halves(blocks):
    if len(blocks) < 2:
        return tuple(blocks)
    middle = (len(blocks) + 1) // 2
    return halves(blocks[:middle]), halves(blocks[middle:])
""",
        """
def halves(blocks):
    def part(first, last):
        if last - first < 2:
            return tuple(blocks[first:last])
        middle = (first + last) // 2
        return tuple(part(*ends) for ends in ((first, middle), (middle, last)))

    return part(0, len(blocks))
""",
    ],
    "peak_of": [
        """
def peak_of(plan, i, b):
    in_front = most = 0
    for part in plan:
        if isinstance(part, tuple):
            most = max(most, in_front + peak_of(part, i, b))
            in_front += b
        else:
            in_front += i + b
            most = max(most, in_front)
    return most
""",
        """
def peak_of(plan, i, b):
    def left(part):
        return b if isinstance(part, tuple) else i + b

    def there(part):
        return peak_of(part, i, b) if isinstance(part, tuple) else i + b

    return max(sum(map(left, plan[:n])) + there(part) for n, part in enumerate(plan))
""",
    ],
    "run": [
        """
from torch.utils.checkpoint import checkpoint


def run(plan, x):
    for part in plan:
        segment = isinstance(part, tuple)
        x = checkpoint(run, part, x, use_reentrant=False) if segment else part(x)
    return x
""",
        """
from functools import partial, reduce


def run(plan, x):
    def step(x, part):
        if not isinstance(part, tuple):
            return part(x)
        return torch.utils.checkpoint.checkpoint(partial(run, part), x, use_reentrant=False)

    return reduce(step, plan, x)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "segments": {
        "short last one dropped": [("len(blocks), k", "len(blocks) - k + 1, k")],
        "single last block bare": [
            ("tuple(plan)", "tuple(p if len(p) > 1 else p[0] for p in plan)")
        ],
        "k segments": [
            ("len(blocks), k", "len(blocks), len(blocks) // k"),
            ("start + k", "start + len(blocks) // k"),
        ],
        "overlapping": [("len(blocks), k", "len(blocks)")],
        "not nested": [("plan.append(", "plan.extend(")],
        "lists": [("tuple(blocks[start : start + k])", "list(blocks[start : start + k])")],
    },
    "halves": {
        "single blocks bare": [("return tuple(blocks)", "return blocks[0]")],
        "halved once": [
            (
                "halves(blocks[:middle]), halves(blocks[middle:])",
                "tuple(blocks[:middle]), tuple(blocks[middle:])",
            )
        ],
        "one half halved": [("halves(blocks[:middle])", "tuple(blocks[:middle])")],
        "middle block lost": [
            ("(len(blocks) + 1) // 2", "len(blocks) // 2"),
            ("middle:", "-middle:"),
        ],
        "powers of two": [("(len(blocks) + 1) // 2", "1 << (len(blocks) - 1).bit_length() - 1")],
        "flat": [("]), halves", "]) + halves")],
        "pairs not halved": [("< 2", "< 3")],
        "one and the rest": [("(len(blocks) + 1) // 2", "1")],
    },
    "peak_of": {
        "from the last on": [("in plan", "in reversed(plan)")],
        "own input counted twice": [("+ peak_of", "+ b + peak_of")],
        "nothing in front": [("in_front + peak_of", "peak_of")],
        "a segment keeps all": [("in_front += b", "in_front += peak_of(part, i, b)")],
        "a segment keeps nothing": [("in_front += b", "pass")],
        "never run again": [("in_front + peak_of(part, i, b)", "in_front + b")],
        "no segments in segments": [("peak_of(part, i, b)", "len(part) * (i + b)")],
        "what is left at the end": [("return most", "return in_front")],
    },
    "run": {
        "no checkpoint": [("checkpoint(run, part, x, use_reentrant=False)", "run(part, x)")],
        "each block a segment": [
            ("checkpoint(run, part, x, use_reentrant=False)", "run(part, x)"),
            ("else part(x)", "else checkpoint(part, x, use_reentrant=False)"),
        ],
        "reentrant": [("False", "True")],
        "the last part in backward": [("run, part, x,", "lambda x: run(part, x), x,")],
        "all parts of the first x": [("        x = ", "        y = "), ("return x", "return y")],
        "from the last on": [("in plan", "in reversed(plan)")],
        "no gradient": [("part(x)", "part(x.detach())")],
        "the first part only": [("    return x", "        return x")],
    },
}
