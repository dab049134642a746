"""Solutions of notebook 31's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "ring_all_reduce": [
        """
def ring_all_reduce(tensors):
    n = len(tensors)
    parts = [np.array_split(tensor, n) for tensor in tensors]
    sent = [0] * n
    for step in range(2 * (n - 1)):
        for rank in range(n):
            index = (rank - 1 - step) % n
            mine, arrived = parts[rank][index], parts[rank - 1][index]
            if step < n - 1:
                mine += arrived
            else:
                mine[:] = arrived
            sent[rank - 1] += arrived.size
    return sent
""",
        """
def ring_all_reduce(tensors):
    n = len(tensors)
    parts = [np.array_split(tensor, n) for tensor in tensors]
    sent = [0] * n
    for last, start in enumerate([0, 1]):
        for step in range(n - 1):
            for rank, index in enumerate((start + r - step) % n for r in range(n)):
                part, target = parts[rank][index], parts[(rank + 1) % n][index]
                target[...] = part if last else part + target
                sent[rank] += part.size
    return sent
""",
    ],
    "bus_gbps": [
        """
def bus_gbps(collective, size_mib, time_ms, n):
    seconds = time_ms / 1000
    sent = size_mib * 2**20 * accounting.bus_factor(collective, n)
    return sent / seconds / 1e9
""",
        """
def bus_gbps(collective, size_mib, time_ms, n):
    return 1.048576 * size_mib / time_ms * accounting.bus_factor(collective, n)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "ring_all_reduce": {
        "adds to the end": [("mine[:] = arrived", "mine += arrived")],
        "one part all the way": [("(rank - 1 - step) % n", "(rank - 1) % n")],
        "takes from the wrong neighbour": [("parts[rank - 1][", "parts[(rank + 1) % n][")],
        "stops a step early": [("2 * (n - 1)", "2 * n - 3")],
        "the sum is a new array": [("mine += arrived", "mine = mine + arrived")],
        "replaces the view, not what it shows": [
            ("mine[:] = arrived", "parts[rank][index] = arrived")
        ],
        "counts messages": [("arrived.size", "1")],
        "counts by the formula": [("arrived.size", "tensors[rank].size / n")],
    },
    "bus_gbps": {
        "the algorithm's bandwidth": [(" * accounting.bus_factor(collective, n)", "")],
        "the factor divides": [("2**20 * acc", "2**20 / acc")],
        "every collective an all-reduce": [("bus_factor(collective", 'bus_factor("all_reduce"')],
        "a million bytes in a MiB": [("2**20", "1e6")],
        "GiB/s": [("1e9", "2**30")],
        "milliseconds taken for seconds": [("time_ms / 1000", "time_ms")],
    },
}
