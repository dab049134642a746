"""Solutions of notebook 51's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "memory_of": [
        """
def memory_of():
    sharded = states + activations / 2
    return sharded / N + activations / 2
""",
        """
def memory_of():
    return states / N + activations * (N + 1) / (2 * N)
""",
    ],
    "smallest_backward_batch": [
        """
def smallest_backward_batch():
    messages = 2
    (batch,) = sp.solve(messages * weights_s - 2 * compute_s, B)
    return batch
""",
        """
def smallest_backward_batch():
    return sp.simplify(weights_s / (compute_s / B))
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "memory_of": {
        "no activation is sharded": [("states + activations / 2", "states + activations / 2 * N")],
        "all activations are sharded": [("/ N + activations / 2", "/ N + activations / (2 * N)")],
        "what is sharded alone": [("/ N + activations / 2", "/ N")],
        "the states are not sharded": [("sharded / N", "(sharded - states) / N + states")],
        "of a number": [("sharded = states", "sharded = states.subs(D, 16384)")],
    },
    "smallest_backward_batch": {
        "gathers alone": [("messages = 2", "messages = 1")],
        "an all-reduce of the gradients": [("messages = 2", "messages = 3")],
        "forward's FLOPs": [("2 * compute_s", "compute_s")],
        "forward's FLOPs, too": [("2 * compute_s", "3 * compute_s")],
        "many devices": [("return batch", "return X * sp.limit(batch / X, X, sp.oo)")],
    },
}
