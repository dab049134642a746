"""Solutions of notebook 54's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "sent": [
        """
def sent(pass_):
    collectives = {"forward": [gather], "backward": [gather, scatter]}
    return sum(collectives[pass_])
""",
        """
def sent(pass_):
    times = 2 if pass_ == "backward" else 1
    return times * (weights - weights / N)
""",
    ],
    "hybrid_s": [
        """
def hybrid_s(pass_, size, inside, card, per_host):
    once = size / inside
    if pass_ == "forward":
        return once, 0.0
    shard = size / per_host
    return 2 * once, 2 * shard / card
""",
        """
def hybrid_s(pass_, size, inside, card, per_host):
    backward = pass_ == "backward"
    return (1 + backward) * size * inside**-1, 2 * backward * size / per_host / card
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "sent": {
        "weights stay after forward": [("[gather, scatter]", "[scatter]")],
        "an all-reduce of the gradients": [("[gather, scatter]", "[gather, 2 * scatter]")],
        "the whole step in backward": [("[gather, scatter]", "[gather, gather, scatter]")],
        "whole weights": [("[gather]", "[weights]")],
        "nothing in forward": [("[gather]", "[]")],
    },
    "hybrid_s": {
        "the whole gradient on each card": [("size / per_host", "size")],
        "an all-reduce sends once": [("2 * shard", "shard")],
        "all cards for each shard": [("shard / card", "shard / (card * per_host)")],
        "weights stay after forward": [("2 * once", "once")],
        "the network in forward, too": [("once, 0.0", "once, 2 * size / per_host / card")],
    },
}
