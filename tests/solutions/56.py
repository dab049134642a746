"""Solutions of notebook 56's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "largest_in_sequence": [
        """
def largest_in_sequence(a, b):
    both = a * b + a + b
    x, y = both / (2 * b), both / (2 * a)
    return x, y
""",
        """
def largest_in_sequence(a, b):
    (y,) = sp.solve((X - 1) / a + (Y - 1) / b - 1, Y)
    (x,) = sp.solve(sp.diff(X * y, X), X)
    return x, y.subs(X, x)
""",
    ],
    "best_split": [
        """
def best_split(a, b):
    return sp.sqrt(N * a / b)
""",
        """
def best_split(a, b):
    (x,) = sp.solve(sp.Eq(1 / a, N / (b * X**2)), X)
    return x
""",
    ],
    "gather_s": [
        """
def gather_s(size, tensor, inside, card, per_host):
    leaving = per_host / tensor * card
    return size / tensor / min(inside, leaving)
""",
        """
def gather_s(size, tensor, inside, card, per_host):
    return max(size / (tensor * inside), size / (per_host * card))
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "largest_in_sequence": {
        "half of each axis alone": [("both / (2 * b), both / (2 * a)", "1 + a / 2, 1 + b / 2")],
        "overlapped": [("both / (2 * b), both / (2 * a)", "1 + a, 1 + b")],
        "as many along each": [("= both / (2 * b), both / (2 * a)", "= [1 + a * b / (a + b)] * 2")],
        "ones forgotten": [("both / (2 * b), both / (2 * a)", "a / 2, b / 2")],
        "X and Y exchanged": [("return x, y", "return y, x")],
    },
    "best_split": {
        "no root": [("sp.sqrt(N * a / b)", "N * a / b")],
        "that is Y": [("a / b", "b / a")],
        "as many along each": [("N * a / b", "N")],
        "without N": [("N * a / b", "a / b")],
        "shares of N": [("sp.sqrt(N * a / b)", "N * a / (a + b)")],
    },
    "gather_s": {
        "the whole message": [("size / tensor /", "size /")],
        "all cards of the host": [("per_host / tensor * card", "per_host * card")],
        "a card for each that shards": [("per_host / tensor", "tensor")],
        "cards only": [("min(inside, leaving)", "leaving")],
        "one after the other": [("/ min(inside, leaving)", "* (1 / inside + 1 / leaving)")],
    },
}
