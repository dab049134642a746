"""Solutions of notebook 22's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "my_fused_bytes": [
        """
def my_fused_bytes(context_length, batch_size=8, itemsize=4):
    matrix = itemsize * batch_size * context_length**2
    written = 2 * matrix
    read = 2 * matrix
    return written + read
""",
        """
def my_fused_bytes(context_length, batch_size=8, itemsize=4):
    numbers = batch_size * context_length * context_length
    return sum(itemsize * numbers for move in ("write s", "read s", "write w", "read w"))
""",
    ],
    "my_compile_seconds": [
        """
import statistics


def my_compile_seconds(step, steady_calls=5):
    def seconds():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    first = seconds()
    steady = [seconds() for _ in range(steady_calls)]
    return first - statistics.median(steady)
""",
        """
import timeit


def my_compile_seconds(step, steady_calls=5):
    first, *steady = timeit.repeat(step, number=1, repeat=1 + steady_calls)
    return first - pd.Series(steady).median()
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "my_fused_bytes": {
        "weights never read": [("read = 2", "read = 1")],
        "softmax alone": [("written + read", "read")],
        "a kernel for the scale": [("written + read", "written + read + 2 * matrix")],
        "nothing fused": [("read = 2", "read = 10")],
        "one sequence": [(" * batch_size", "")],
        "numbers": [("itemsize * ", "")],
        "always float32": [("itemsize * ", "4 * ")],
        "not squared": [("**2", "")],
    },
    "my_compile_seconds": {
        "steady not subtracted": [(" - statistics.median(steady)", "")],
        "mean": [("median(", "mean(")],
        "fastest": [("statistics.median(", "min(")],
        "not sorted": [("statistics.median(steady)", "steady[steady_calls // 2]")],
        "first among the steady": [("median(steady)", "median([first, *steady])")],
        "first call not timed": [("first = ", "step()\n    first = ")],
        "the last call": [("statistics.median(steady)", "steady[-1]")],
        "always five": [("range(steady_calls)", "range(5)")],
        "what is steady": [("first - ", "")],
        "all steady calls": [("statistics.median(", "sum(")],
    },
}
