"""Solutions of notebook 53's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "border": [
        """
def border():
    devices = sp.solve(all_reduce_s - matmuls_s, N)[0]
    return sp.expand(devices)
""",
        """
def border():
    return 1 + B * W / C
""",
    ],
    "gather_s": [
        """
def gather_s(size, devices, inside, card, per_host):
    sent = size * (devices - 1) / devices
    return max(sent / inside, sent / (per_host * card))
""",
        """
def gather_s(size, devices, inside, card, per_host):
    cards = per_host * card
    rate = cards if cards < inside else inside
    return (size - size / devices) / rate
""",
    ],
    "tokens_needed": [
        """
def tokens_needed(flops_per_s, inside, card, per_host):
    return max(flops_per_s / inside, flops_per_s / (per_host * card))
""",
        """
def tokens_needed(flops_per_s, inside, card, per_host):
    shared = inside / per_host
    slowest = card if card < shared else shared
    return flops_per_s / slowest / per_host
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "border": {
        "a scatter alone": [("all_reduce_s -", "all_reduce_s / 2 -")],
        "forward's matmuls": [("- matmuls_s", "- matmuls_s / 2")],
        "many devices": [("expand(devices)", "expand(devices - 1)")],
        "the batch": [(", N)", ", B)")],
        "upside down": [("expand(devices)", "expand(1 + B * C / W)")],
    },
    "gather_s": {
        "one card": [("(per_host * card)", "card")],
        "inside, then across": [
            (
                "max(sent / inside, sent / (per_host * card))",
                "sent / inside + sent / (per_host * card)",
            )
        ],
        "the fastest decides": [("max(", "min(")],
        "the cards decide": [
            ("max(sent / inside, sent / (per_host * card))", "sent / (per_host * card)")
        ],
        "sends all": [(" * (devices - 1) / devices", "")],
        "a ring of hosts": [("(devices - 1) / devices", "(devices - per_host) / devices")],
        "an all-reduce": [("size *", "2 * size *")],
    },
    "tokens_needed": {
        "one card": [("(per_host * card)", "card")],
        "one host": [
            ("max(flops_per_s / inside, flops_per_s / (per_host * card))", "flops_per_s / inside")
        ],
        "the cards decide": [
            (
                "max(flops_per_s / inside, flops_per_s / (per_host * card))",
                "flops_per_s / (per_host * card)",
            )
        ],
        "the fastest decides": [("max(", "min(")],
        "tokens for a host": [("return max", "return per_host * max")],
    },
}
