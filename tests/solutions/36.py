"""Solutions of notebook 36's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "most_gain_ms": [
        """
def most_gain_ms(backward_ms, sent_ms, last_ms):
    naive = backward_ms + sent_ms
    overlapped = max(backward_ms + last_ms, sent_ms)
    return naive - overlapped
""",
        """
def most_gain_ms(backward_ms, sent_ms, last_ms):
    before_last = sent_ms - last_ms
    return before_last if before_last < backward_ms else backward_ms
""",
    ],
    "union": [
        """
def union(spans):
    merged = []
    for start, end in sorted(spans):
        if not merged or start > merged[-1][1]:
            merged.append((start, end))
        else:
            first, last = merged.pop()
            merged.append((first, max(last, end)))
    return merged
""",
        """
def union(spans):
    found, depth = [], 0
    for at, change in sorted([(a, -1) for a, _ in spans] + [(b, 1) for _, b in spans]):
        start = at if depth == 0 else start
        depth -= change
        if depth == 0:
            found.append((start, at))
    return found
""",
    ],
    "exposed_ms": [
        """
def exposed_ms(computing, communicating):
    exposed = 0
    computing = union(computing)
    for start, end in union(communicating):
        exposed += end - start
        for first, last in computing:
            exposed -= max(0, min(end, last) - max(start, first))
    return exposed
""",
        """
def exposed_ms(computing, communicating):
    def during(spans):
        return any(start <= at < end for start, end in spans)

    total, cuts = 0, sorted(sum(map(list, [*computing, *communicating]), []))
    for at, until in zip(cuts, cuts[1:]):
        if during(communicating) and not during(computing):
            total += until - at
    return total
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "most_gain_ms": {
        "the last one hides, too": [("backward_ms + last_ms", "backward_ms")],
        "the link always keeps up": [
            ("max(backward_ms + last_ms, sent_ms)", "backward_ms + last_ms")
        ],
        "the last one is sent again": [
            ("backward_ms + last_ms, sent_ms)", "backward_ms, sent_ms) + last_ms")
        ],
        "the shorter of two that must both end": [("max(", "min(")],
        "the loss": [("naive - overlapped", "overlapped - naive")],
    },
    "union": {
        "a span inside another shortens it": [("max(last, end)", "end")],
        "whole milliseconds": [("sorted(spans)", "sorted((int(a), int(b)) for a, b in spans)")],
        "compares with the last given": [("merged[-1][1]", "spans[-1][1]")],
        "sorted by the end": [("sorted(spans)", "sorted(spans, key=lambda span: span[1])")],
        "spans that touch stay apart": [("start > ", "start >= ")],
        "compares starts": [("merged[-1][1]", "merged[-1][0]")],
    },
    "exposed_ms": {
        "messages at once count twice": [("union(communicating)", "communicating")],
        "kernels at once hide twice": [("    computing = union(computing)\n", "")],
        "subtracts all that is computed": [
            ("max(0, min(end, last) - max(start, first))", "last - first")
        ],
        "what is apart adds": [
            ("max(0, min(end, last) - max(start, first))", "min(end, last) - max(start, first)")
        ],
        "a part of a kernel hides nothing": [
            (
                "max(0, min(end, last) - max(start, first))",
                "(last - first) * (start <= first and last <= end)",
            )
        ],
        "computes and does not communicate": [
            (
                "computing = union(computing)",
                "computing, communicating = union(communicating), computing",
            )
        ],
    },
}
