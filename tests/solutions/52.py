"""Solutions of notebook 52's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "whole_ring": [
        """
def whole_ring(mine, rank, n):
    total = mine.clone()
    passing = mine
    for _ in range(n - 1):
        passing = yield passing
        total += passing
    return total
""",
        """
def whole_ring(mine, rank, n):
    total, moving = torch.zeros_like(mine), mine
    for left in reversed(range(n)):
        total = total + moving
        if left > 0:
            moving = yield moving
    return total
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "whole_ring": {
        "passes on the sum": [("yield passing", "yield total.clone()")],
        "sends its own each time": [("yield passing", "yield mine")],
        "gets its own back": [("range(n - 1)", "range(n)")],
        "leaves one out": [("range(n - 1)", "range(n - 2)")],
        "changes its own": [("mine.clone()", "mine"), ("passing = mine", "passing = mine.clone()")],
        "the sum of the others": [("mine.clone()", "torch.zeros_like(mine)")],
        "the mean": [("return total", "return total / n")],
    },
}
