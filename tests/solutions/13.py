"""Solutions of notebook 13's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "spacing": [
        """
def spacing(total):
    return 2.0 ** (math.floor(math.log2(total)) - 10)
""",
        """
def spacing(total):
    _, exponent = math.frexp(total)
    return math.ldexp(1.0, exponent - 11)
""",
    ],
    "replay": [
        """
def replay(value, count, total_dtype, addend_dtype):
    total = torch.tensor(0.0, dtype=total_dtype)
    addend = torch.tensor(value, dtype=addend_dtype)
    totals = [total.clone()]
    for _ in range(count):
        total += addend
        totals.append(total.clone())
    return torch.stack(totals).double()
""",
        """
def replay(value, count, total_dtype, addend_dtype):
    addend = torch.tensor(value, dtype=addend_dtype)
    totals = torch.zeros(count + 1, dtype=torch.float64)
    for i in range(count):
        totals[i + 1] = (totals[i].to(total_dtype) + addend).to(total_dtype)
    return totals
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "spacing": {
        "bits after the first counted as 11": [("- 10", "- 11")],
        "of bfloat16": [("- 10", "- 7")],
        "rounded to the nearest": [("math.floor", "round")],
        "rounded up": [("math.floor", "math.ceil")],
        "rounded towards zero": [("math.floor", "int")],
        "in proportion": [("2.0 ** (math.floor(math.log2(total)) - 10)", "total * 2.0**-10")],
    },
    "replay": {
        "the total takes the wider dtype": [("total += addend", "total = total + addend")],
        "the addend has the total's dtype": [("dtype=addend_dtype", "dtype=total_dtype")],
        "the addend has no dtype": [("total += addend", "total += value")],
        "one tensor, many times": [("append(total.clone())", "append(total)")],
        "without the 0": [("[total.clone()]", "[]")],
        "always a thousand": [("range(count)", "range(1000)")],
        "multiplied": [
            ("for _ in range(count)", "for i in range(count)"),
            ("total += addend", "total = ((i + 1) * addend).to(total_dtype)"),
        ],
    },
}
