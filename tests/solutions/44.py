"""Solutions of notebook 44's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "hides": [
        """
def hides(parameters, tokens, element_bytes, flops_per_s, bytes_per_s, ranks=2):
    received = (ranks - 1) / ranks * element_bytes
    gather = parameters * received / bytes_per_s
    forward = 2 * parameters * tokens / flops_per_s
    least = received * flops_per_s / (2 * tokens)
    return gather, forward, least
""",
        """
def hides(parameters, tokens, element_bytes, flops_per_s, bytes_per_s, ranks=2):
    size = parameters * element_bytes
    seconds = (size - size / ranks) / bytes_per_s, 2 * parameters * tokens / flops_per_s
    return *seconds, bytes_per_s * seconds[0] / seconds[1]
""",
    ],
    "could_begin": [
        """
def could_begin(launches, ends, mark):
    times = ends[launches < mark].tolist()
    after = launches[launches >= mark]
    if len(after):
        times.append(after.iloc[0])
    return max(times)
""",
        """
def could_begin(launches, ends, mark):
    done = ends.where(launches < mark).max()
    launched = launches.where(launches >= mark).min()
    return pd.Series([done, launched]).max()
""",
    ],
    "computing_share": [
        """
def computing_share(start, end, spans):
    covered = 0
    for a, b in spans:
        inside = min(b, end) - max(a, start)
        if inside > 0:
            covered += inside
    return covered / (end - start)
""",
        """
def computing_share(start, end, spans):
    def within(moment):
        return min(max(moment, start), end)

    return sum(within(b) - within(a) for a, b in spans) / (end - start)
""",
    ],
    "least_bandwidth": [
        """
def least_bandwidth(starts, needed, sizes):
    least = []
    for i, moment in enumerate(needed):
        queued, rates = 0, []
        for j in range(i, -1, -1):
            queued += sizes[j]
            rates.append(queued / (moment - starts[j]))
        least.append(max(rates))
    return least
""",
        """
def least_bandwidth(starts, needed, sizes):
    def rate(j, i):
        return sum(sizes[j : i + 1]) / (needed[i] - starts[j])

    return [max(rate(j, i) for j in range(i + 1)) for i in range(len(sizes))]
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "hides": {
        "the whole block is received": [("(ranks - 1) / ranks", "1")],
        "the share that it has": [("(ranks - 1) / ranks", "1 / ranks")],
        "always two ranks": [("(ranks - 1) / ranks", "0.5")],
        "one FLOP a parameter": [("2 * parameters", "parameters"), ("(2 * tokens)", "tokens")],
        "a share of the least bandwidth": [
            ("received * flops_per_s", "element_bytes * flops_per_s")
        ],
        "always 16 bits": [("element_bytes\n", "2\n")],
    },
    "could_begin": {
        "GPU only": [("    if len(after):\n        times.append(after.iloc[0])\n", "")],
        "host's mark, not its launch": [("after.iloc[0]", "mark")],
        "what ended before the mark": [("ends[launches", "ends[ends")],
        "what is launched at the mark": [("< mark", "<= mark"), (">= mark", "> mark")],
        "nothing may be missing": [("    if len(after):\n        times", "    times")],
        "the next one by its label": [("after.iloc[0]", "launches[len(times)]")],
    },
    "computing_share": {
        "below zero, too": [("inside > 0", "True")],
        "until one lies outside": [
            ("+= inside\n", "+= inside\n        else:\n            break\n")
        ],
        "only what lies inside whole": [("inside > 0", "start <= a and b <= end")],
        "not cut at its start": [("max(a, start)", "a")],
        "not cut at its end": [("min(b, end)", "b")],
    },
    "least_bandwidth": {
        "no queue": [("range(i, -1, -1)", "[i]")],
        "only from the first": [("max(rates)", "rates[-1]")],
        "whoever is needed last": [("(moment -", "(max(needed[: i + 1]) -")],
        "one before it at most": [("range(i, -1, -1)", "range(i, max(i - 2, -1), -1)")],
        "rates of all before stay": [
            ("queued, rates = 0, []", "queued = 0"),
            ("    least = []\n", "    least, rates = [], []\n"),
        ],
    },
}
