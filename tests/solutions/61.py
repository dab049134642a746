"""Solutions of notebook 61's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "flops_per_byte": [
        """
def flops_per_byte(d, d_ff, tokens):
    return {"qkv": d, "h": d, "ab": d, "attention": tokens}
""",
        """
def flops_per_byte(d, d_ff, tokens):
    flops = {"qkv": 6 * d * d, "h": 2 * d * d, "ab": 4 * d * d_ff, "attention": 2 * tokens * d}
    numbers = {"qkv": 3 * d, "h": d, "ab": 2 * d_ff, "attention": d}
    return {name: flops[name] / (2 * numbers[name]) for name in flops}
""",
    ],
    "chunked_loss": [
        """
@torch.no_grad()
def chunked_loss(hidden, weight, targets, chunk):
    n = len(hidden)
    loss, d_hidden, d_weight = 0, torch.empty_like(hidden), torch.zeros_like(weight)
    for i in range(0, n, chunk):
        h, t = hidden[i : i + chunk], targets[i : i + chunk]
        log_p = (h @ weight.T).log_softmax(-1)
        loss -= log_p.gather(1, t[:, None]).sum() / n
        d = log_p.exp_()
        d[torch.arange(len(t)), t] -= 1
        d /= n
        d_hidden[i : i + chunk] = d @ weight
        d_weight += d.T @ h
    return loss, d_hidden, d_weight
""",
        """
def chunked_loss(hidden, weight, targets, chunk):
    loss, d_hidden, d_weight = 0, torch.empty_like(hidden), torch.zeros_like(weight)
    for i in range(0, len(hidden), chunk):
        part = hidden[i : i + chunk].detach().requires_grad_()
        w = weight.detach().requires_grad_()
        total = F.cross_entropy(part @ w.T, targets[i : i + chunk], reduction="sum")
        mean = total / len(hidden)
        d_hidden[i : i + chunk], d_w = torch.autograd.grad(mean, (part, w))
        d_weight += d_w
        loss += mean.detach()
    return loss, d_hidden, d_weight
""",
    ],
    "rms_norm_backward": [
        """
def rms_norm_backward(dy, x, w, eps=1e-5):
    r = 1 / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    n = r * x
    g = dy * w
    dx = r * (g - n * (g * n).mean(-1, keepdim=True))
    return dx, (dy * n).sum(0)
""",
        """
def rms_norm_backward(dy, x, w, eps=1e-5):
    d = x.shape[1]
    r = (x.norm(dim=1) ** 2 / d + eps) ** -0.5
    along = (dy * w * x).sum(1) * r**3 / d
    dx = r[:, None] * w * dy - along[:, None] * x
    return dx, torch.einsum("nd,nd,n->d", dy, x, r)
""",
    ],
    "feed_forward_backward": [
        """
def feed_forward_backward(dy, n, a, b, w1, w2, w3):
    s = a.sigmoid()
    silu = a * s
    dc = dy @ w2
    da = dc * b * s * (1 + a * (1 - s))
    db = dc * silu
    dn = da @ w1 + db @ w3
    return dn, da.T @ n, dy.T @ (silu * b), db.T @ n
""",
        """
def feed_forward_backward(dy, n, a, b, w1, w2, w3):
    s, silu, dc = torch.sigmoid(a), F.silu(a), dy.mm(w2)
    d_b = silu * dc
    d_a = (s + silu - s * silu) * b * dc
    d_w1, d_w2, d_w3 = d_a.T.mm(n), dy.T.mm(silu * b), d_b.T.mm(n)
    return d_b.mm(w3) + d_a.mm(w1), d_w1, d_w2, d_w3
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "flops_per_byte": {
        "ab from d_ff": [('"ab": d', '"ab": d_ff')],
        "a and b: bytes of one": [('"ab": d', '"ab": 2 * d')],
        "attention is not causal": [("tokens}", "2 * tokens}")],
        "attention is a linear layer": [("tokens}", "d}")],
    },
    "chunked_loss": {
        "all logits at once": [("    n = len(hidden)\n", "    n = chunk = len(hidden)\n")],
        "all chunks' logits stay": [
            ("    n = len(hidden)\n", "    n, kept = len(hidden), []\n"),
            ("d /= n", "d /= n\n        kept.append(d)"),
        ],
        "a chunk's mean": [("d /= n", "d /= len(t)")],
        "the mean of the chunks' means": [(".sum() / n", ".mean() / -(-n // chunk)")],
        "whole chunks only": [("range(0, n,", "range(0, n - chunk + 1,")],
        "the last chunk's d_weight": [("d_weight += ", "d_weight = ")],
        "one less in whole columns": [("torch.arange(len(t)), t", ":, t")],
    },
    "rms_norm_backward": {
        "1/RMS as a constant": [("(g - n * (g * n).mean(-1, keepdim=True))", "g")],
        "mean over all": [("(g * n).mean(-1, keepdim=True)", "(g * n).mean()")],
        "sum over a row": [("(g * n).mean(", "(g * n).sum(")],
        "dw by g": [("(dy * n)", "(g * n)")],
        "dw by x": [("(dy * n)", "(dy * x)")],
        "its own epsilon": [("+ eps", "+ 1e-5")],
    },
    "feed_forward_backward": {
        "sigmoid's derivative": [("(1 + a * (1 - s))", "(1 - s)")],
        "db without silu": [("dc * silu", "dc * a")],
        "w3 overwritten": [("    return dn", "    w3.zero_()\n    return dn")],
        "w1 and w3 exchanged": [("return dn, da.T", "return dn, db.T"), ("b), db.T", "b), da.T")],
        "a is made again": [("    s = a", "    a = n @ w1.T\n    s = a")],
    },
}
