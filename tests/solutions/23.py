"""Solutions of notebook 23's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "row_sums_kernel": [
        """
@triton.jit
def row_sums_kernel(
    x_ptr, w_ptr, y_ptr, n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, n_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        there = (rows[:, None] < n_rows) & (columns < n_columns)
        w = tl.load(w_ptr + columns, mask=columns < n_columns, other=0.0)
        x = tl.load(x_ptr + rows[:, None] * n_columns + columns, mask=there, other=0.0)
        total += tl.sum(w * x, axis=1)
    tl.store(y_ptr + rows, total, mask=rows < n_rows)
""",
        """
@triton.jit
def row_sums_kernel(
    x_ptr, w_ptr, y_ptr, n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, n_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        down = columns[:, None]
        at = x_ptr + down + rows[None, :] * n_columns
        x = tl.load(at, mask=(down < n_columns) & (rows[None, :] < n_rows), other=0.0)
        w = tl.load(w_ptr + down, mask=down < n_columns, other=0.0)
        total = total + tl.sum(x.to(tl.float32) * w, 0)
    tl.store(y_ptr + rows, total, mask=rows < n_rows)
""",
    ],
    "row_sums_backward": [
        """
@triton.jit
def row_sums_backward(
    dy_ptr, x_ptr, w_ptr, dx_ptr, partial_ptr, n_rows, n_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows[:, None] < n_rows) & (columns < n_columns)
    at = rows[:, None] * n_columns + columns
    w = tl.load(w_ptr + columns, mask=columns < n_columns, other=0.0)
    dy = tl.load(dy_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
    tl.store(dx_ptr + at, dy * w, mask=inside)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    line = partial_ptr + program * n_columns
    tl.store(line + columns, tl.sum(dy * x, axis=0), mask=columns < n_columns)
""",
        """
@triton.jit
def row_sums_backward(
    dy_ptr, x_ptr, w_ptr, dx_ptr, partial_ptr, n_rows, n_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows[:, None] < n_rows) & (columns < n_columns)
    at = rows[:, None] * n_columns + columns
    x = tl.load(x_ptr + at, mask=inside)
    dy = tl.load(dy_ptr + rows[:, None], mask=rows[:, None] < n_rows)
    product = tl.where(inside, x * dy, 0.0)
    own = program * n_columns + columns
    tl.store(partial_ptr + own, tl.sum(product, 0), mask=columns < n_columns)
    w = tl.load(w_ptr + columns, mask=columns < n_columns)
    tl.store(dx_ptr + at, w * dy, mask=inside)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "row_sums_kernel": {
        "only the last tile counts": [("total += ", "total = ")],
        "the weights of the first tile in each": [
            ("w_ptr + columns, ", "w_ptr + tl.arange(0, COLUMNS), ")
        ],
        "rows lie COLUMNS apart": [("[:, None] * n_columns", "[:, None] * COLUMNS")],
        "no bound on columns": [
            (" & (columns < n_columns)", " & (columns >= 0)"),
            ("mask=columns < n_columns, other=0.0", "mask=columns >= 0"),
        ],
        "w is read beyond its end": [(", mask=columns < n_columns, other=0.0", "")],
        "x is read beyond its last row": [("(rows[:, None] < n_rows)", "(rows[:, None] >= 0)")],
        "what is masked of x is anything": [("mask=there, other=0.0", "mask=there")],
    },
    "row_sums_backward": {
        "all programs write to the first line": [("program * n_columns\n", "0 * n_columns\n")],
        "lines lie COLUMNS apart": [("program * n_columns\n", "program * COLUMNS\n")],
        "what is masked of dy is anything": [("rows < n_rows, other=0.0", "rows < n_rows")],
        "dw without dy": [("tl.sum(dy * x,", "tl.sum(x,")],
        "dx is written beyond its last row": [
            ("dy * w, mask=inside", "dy * w, mask=columns[None, :] < n_columns")
        ],
        "a line is written beyond its end": [("axis=0), mask=columns < n_columns", "axis=0)")],
    },
}
