"""Solutions of notebook 14's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "mixed_step": [
        """
def mixed_step(module, x, targets, dtype):
    with torch.autocast(device_type=x.device.type, dtype=dtype):
        logits = module(x)
        loss = torch.nn.CrossEntropyLoss()(logits, targets)
    loss.backward()
    return logits, loss
""",
        """
def mixed_step(module, x, targets, dtype):
    @torch.autocast(x.device.type, dtype)
    def forward():
        logits = module(x)
        return logits, torch.nn.functional.cross_entropy(logits, targets)

    module.zero_grad()
    logits, loss = forward()
    loss.backward()
    return logits, loss
""",
    ],
    "running_mean": [
        """
def running_mean(x):
    total = x[..., :1].clone()
    for place in range(1, x.shape[-1]):
        total += x[..., place : place + 1]
    return total / x.shape[-1]
""",
        """
def running_mean(x):
    total = torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        total = total + term
    return (total / x.shape[-1]).unsqueeze(-1)
""",
    ],
    "layer_norm": [
        """
def layer_norm(x, dtype, mean, eps=1e-5):
    x = x.to(dtype)
    centred = x - mean(x)
    variance = mean(centred * centred)
    return centred / torch.sqrt(variance + eps)
""",
        """
def layer_norm(x, dtype, mean, eps=1e-5):
    low = x.to(dtype)
    low = low - mean(low)
    root = mean(low.square()).add(eps).sqrt()
    return low.div(root)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "mixed_step": {
        "logits cast by hand": [
            ("        loss = ", "    loss = "),
            ("(logits, targets)", "(logits.float(), targets)"),
        ],
        "backward in the region": [("    loss.back", "        loss.back")],
        "twice the loss": [("loss.backward()", "(2 * loss).backward()")],
        "weights converted": [("module(x)", "module.to(dtype)(x.to(dtype))")],
        "always bfloat16": [("dtype=dtype", "dtype=torch.bfloat16")],
        "always on the CPU": [("x.device.type", "'cpu'")],
        "another forward for the loss": [("(logits, targets)", "(module(x), targets)")],
    },
    "running_mean": {
        "the input overwritten": [(".clone()", "")],
        "sum in float32, rounded once": [
            (".clone()", ".float().clone()"),
            ("return total / x.shape[-1]", "return (total / x.shape[-1]).to(x.dtype)"),
        ],
        "sum by torch": [
            ("x[..., :1].clone()", "x.sum(-1, keepdim=True)"),
            ("range(1, x.shape[-1])", "()"),
        ],
        "each term divided": [
            ("clone()", "clone() / x.shape[-1]"),
            ("place + 1]", "place + 1] / x.shape[-1]"),
            ("return total / x.shape[-1]", "return total"),
        ],
        "from the last to the first": [
            ("x[..., :1]", "x[..., -1:]"),
            ("range(1, x.shape[-1])", "reversed(range(x.shape[-1] - 1))"),
        ],
        "dimension dropped": [("return total", "return total[..., 0]")],
        "rows of a matrix only": [("x[..., place", "x[:, place")],
    },
    "layer_norm": {
        "computed in float32": [
            ("x.to(dtype)", "x.to(dtype).float()"),
            (
                "centred / torch.sqrt(variance + eps)",
                "(centred / torch.sqrt(variance + eps)).to(dtype)",
            ),
        ],
        "not converted": [("x.to(dtype)", "x")],
        "centred before": [("x.to(dtype)", "(x - x.mean(-1, keepdim=True)).to(dtype)")],
        "squares in float32": [("mean(centred * centred)", "mean(centred.float() ** 2).to(dtype)")],
        "first mean by torch": [("mean(x)", "x.mean(-1, keepdim=True)")],
        "root in float32": [
            ("torch.sqrt(variance + eps)", "torch.sqrt(variance.float() + eps).to(dtype)")
        ],
        "variance as a difference of means": [
            ("mean(centred * centred)", "mean(x * x) - mean(x) ** 2")
        ],
        "eps after the root": [("torch.sqrt(variance + eps)", "(torch.sqrt(variance) + eps)")],
        "always the same eps": [("+ eps", "+ 1e-5")],
    },
}
