"""Solutions of notebook 12's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "passes_over_scores": [
        """
def passes_over_scores():
    return dict(maximum=1, subtract=2, exponential=2, sum=1, divide=2)
""",
        """
def passes_over_scores():
    passes = dict.fromkeys(["maximum", "subtract", "exponential", "sum", "divide"], 1)
    for writes_as_many in ("subtract", "exponential", "divide"):
        passes[writes_as_many] += 1
    return passes
""",
    ],
    "attention_in_ranges": [
        """
def attention_in_ranges(q, k, v, visible):
    with nvtx.annotate("scores"):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = torch.where(visible, scores, -torch.inf)
    with nvtx.annotate("softmax"):
        weights = scores.softmax(-1)
    with nvtx.annotate("values"):
        out = weights @ v
    return out
""",
        """
def attention_in_ranges(q, k, v, visible):
    with nvtx.annotate("scores"):
        scores = torch.einsum("...qd,...kd->...qk", q / q.shape[-1] ** 0.5, k)
        scores.masked_fill_(visible.logical_not(), -torch.inf)
    with nvtx.annotate("softmax"):
        weights = (scores - scores.logsumexp(-1, keepdim=True)).exp_()
    with nvtx.annotate("values"):
        return torch.einsum("...qk,...kd->...qd", weights, v)
""",
    ],
    "nsys_command": [
        """
def nsys_command(program, report):
    words = "nsys profile --trace=nvtx,cuda --capture-range=cudaProfilerApi"
    return [*words.split(), "--capture-range-end=stop", f"--output={report}", *program]
""",
        """
def nsys_command(program, report):
    command = ["nsys", "profile", "-o", str(report), "-t", "cuda,nvtx", "-c", "cudaProfilerApi"]
    command.append("--capture-range-end=stop")
    return command + list(program)
""",
    ],
    "kernels_of": [
        """
def kernels_of(kernels, opened):
    after = kernels.launch_ns >= opened.start_ns
    return kernels[after & (kernels.launch_ns <= opened.end_ns)]
""",
        """
def kernels_of(kernels, opened):
    low, high = opened["start_ns"], opened["end_ns"]
    return kernels.query("@low <= launch_ns <= @high")
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "passes_over_scores": {
        "a row's number counts": [("maximum=1", "maximum=2")],
        "the sum writes as many": [("sum=1", "sum=2")],
        "subtraction only reads": [("subtract=2", "subtract=1")],
        "exponential in place": [("exponential=2", "exponential=1")],
        "divide reads the sums, too": [("divide=2", "divide=3")],
        "eight, but others": [("maximum=1, subtract=2", "maximum=2, subtract=1")],
    },
    "attention_in_ranges": {
        "not scaled": [(" * q.shape[-1] ** -0.5", "")],
        "three dimensions only": [("k.mT", "k.transpose(1, 2)")],
        "queries scaled in place": [
            ("q @ k.mT * q", "q.mul_(q"),
            ("** -0.5\n", "** -0.5) @ k.mT\n"),
        ],
        "scaled by the length": [("q.shape[-1]", "q.shape[-2]")],
        "mask turned round": [("scores, -torch.inf", "-torch.inf, scores")],
        "scaled in the softmax": [
            (" * q.shape[-1] ** -0.5", ""),
            ("scores.softmax", "(scores * q.shape[-1] ** -0.5).softmax"),
        ],
        "mask in no range": [("        scores = torch", "    scores = torch")],
        "softmax within the scores": [
            (
                '    with nvtx.annotate("softmax"):\n    ',
                '        with nvtx.annotate("softmax"):\n        ',
            )
        ],
        "values in the softmax's range": [('    with nvtx.annotate("values"):\n', "")],
    },
    "nsys_command": {
        "warm-up, too": [(" --capture-range=cudaProfilerApi", "")],
        "no NVTX": [("nvtx,cuda", "cuda")],
        "goes on after the call": [("end=stop", "end=none")],
        "options after the program": [
            ('f"--output={report}", *program', '*program, f"--output={report}"')
        ],
        "a report of its own name": [("={report}", "=report")],
        "always Python": [("*program", '"python", *program[1:]')],
        "the program as one word": [("*program", '" ".join(program)')],
        "words of the program split": [("*program", '*" ".join(program).split()')],
    },
    "kernels_of": {
        "those that run then": [
            ("kernels.launch_ns >=", "kernels.start_ns >="),
            ("kernels.launch_ns <=", "kernels.start_ns <="),
        ],
        "those of the same thread": [("after &", "after & (kernels.thread == opened.thread) &")],
        "those that are done by then": [("kernels.launch_ns <=", "kernels.end_ns <=")],
        "of other kernels": [("return kernels", "kernels = launched\n    return kernels")],
        "all that come later": [("after & (kernels.launch_ns <= opened.end_ns)", "after")],
    },
}
