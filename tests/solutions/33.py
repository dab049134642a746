"""Solutions of notebook 33's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "communication_share": [
        """
def communication_share(tokens, flops_per_s, bytes_per_s):
    forward, backward = 2 * tokens / flops_per_s, 4 * tokens / flops_per_s
    sent = 4 / bytes_per_s
    return sent / (forward + backward + sent)
""",
        """
def communication_share(tokens, flops_per_s, bytes_per_s):
    return 1 / (1 + 1.5 * tokens * bytes_per_s / flops_per_s)
""",
    ],
    "tokens_for": [
        """
def tokens_for(share, flops_per_s, bytes_per_s):
    return 4 * flops_per_s * (1 - share) / (6 * share * bytes_per_s)
""",
        """
def tokens_for(share, flops_per_s, bytes_per_s):
    sent = 4 / bytes_per_s
    step = sent / share
    return (step - sent) / 6 * flops_per_s
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "communication_share": {
        "over compute, not the step": [("backward + sent", "backward")],
        "the share of compute": [("return sent", "return (forward + backward)")],
        "no forward": [("(forward + ", "(")],
        "backward costs as much as forward": [("4 * tokens", "2 * tokens")],
        "gradients of two bytes": [("4 / bytes", "2 / bytes")],
        "a gradient for each token": [("4 / bytes", "4 * tokens / bytes")],
    },
    "tokens_for": {
        "communication over compute": [(" * (1 - share)", "")],
        "the share of compute": [("(1 - share) / (6 * share", "share / (6 * (1 - share)")],
        "no forward": [("6 *", "4 *")],
        "gradients of two bytes": [("4 *", "2 *")],
    },
}
