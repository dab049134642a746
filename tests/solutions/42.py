"""Solutions of notebook 42's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "held": [
        """
def held(parameter_bytes, ranks, sharded=()):
    found = {}
    for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer state", 2)):
        share = 1 / ranks if name in sharded else 1
        found[name] = copies * parameter_bytes * share
    return found
""",
        """
def held(parameter_bytes, ranks, sharded=()):
    parts = dict.fromkeys(("parameters", "gradients"), parameter_bytes)
    parts["optimizer state"] = 2 * parameter_bytes
    for name in sharded:
        parts[name] /= ranks
    return parts
""",
    ],
    "sent": [
        """
def sent(size, ranks, collectives):
    passes = 0
    for name in collectives:
        passes += 2 if name == "all_reduce" else 1
    return size * passes * (ranks - 1) / ranks
""",
        """
def sent(size, ranks, collectives):
    names = list(collectives) + [name for name in collectives if name == "all_reduce"]
    return sum(size * (ranks - 1) / ranks for _ in names)
""",
    ],
    "gradient_peak": [
        """
def gradient_peak(sizes, ranks, outstanding):
    now = most = 0
    for i, size in enumerate(sizes):
        now += size
        if i >= outstanding:
            oldest = sizes[i - outstanding]
            now -= oldest - oldest / ranks
        most = max(most, now)
    return most
""",
        """
def gradient_peak(sizes, ranks, outstanding):
    moments = [0]
    for i in range(len(sizes)):
        whole = range(max(0, i - outstanding + 1), i + 1)
        moments.append(sum(sizes[k] / (1 if k in whole else ranks) for k in range(i + 1)))
    return max(moments)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "held": {
        "all is shared": [(" if name in sharded else 1", "")],
        "what is not in sharded is shared": [("name in sharded", "name not in sharded")],
        "all with gradients": [("name in sharded", "{name, 'gradients'} & {*sharded}")],
        "always two ranks": [("1 / ranks", "1 / 2")],
        "under another name": [('("optimizer state", 2)', '("moments", 2)')],
    },
    "sent": {
        "one pass for an all-reduce": [('2 if name == "all_reduce" else 1', "1")],
        "one all-reduce counts twice": [("= 2 if", "= 2 if not passes and")],
        "its own part": [("(ranks - 1) / ranks", "1 / ranks")],
        "to each other rank": [("(ranks - 1) / ranks", "(ranks - 1)")],
    },
    "gradient_peak": {
        "the end": [("max(most, now)", "now")],
        "no share is left": [("oldest - oldest / ranks", "oldest")],
        "one outstanding": [("i >= outstanding", "i >= 1"), ("i - outstanding", "i - 1")],
        "the newest is reduced": [("sizes[i - outstanding]", "size")],
        "the peak before the reduction": [
            ("        most = max(most, now)\n", ""),
            ("now += size\n", "now += size\n        most = max(most, now)\n"),
        ],
    },
}
