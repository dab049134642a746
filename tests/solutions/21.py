"""Solutions of notebook 21's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "my_softmax": [
        """
def my_softmax(scores):
    largest = scores.detach().max(dim=-1, keepdim=True).values
    weights = torch.exp(scores - largest)
    return weights / weights.sum(dim=-1, keepdim=True)
""",
        """
def my_softmax(scores):
    with torch.no_grad():
        top = scores.amax(-1).unsqueeze(-1)
    e = (scores - top).exp()
    return e / e.sum(-1)[..., None]
""",
    ],
    "my_attention": [
        """
def my_attention(q, k, v, is_causal=False):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        queries = torch.arange(q.shape[-2], device=q.device)[:, None]
        hidden = torch.arange(k.shape[-2], device=q.device) > queries
        scores = scores.masked_fill(hidden, -torch.inf)
    return my_softmax(scores) @ v
""",
        """
def my_attention(q, k, v, is_causal=False):
    scores = torch.einsum("...id,...jd->...ij", q * q.shape[-1] ** -0.5, k)
    if is_causal:
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype, device=q.device)
        scores = scores + mask.triu(1)
    return torch.einsum("...ij,...jd->...id", my_softmax(scores), v)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "my_softmax": {
        "no maximum": [("scores - largest", "scores")],
        "one maximum of all": [("max(dim=-1, keepdim=True).values", "max()")],
        "largest magnitude": [("max(dim", "abs().max(dim")],
        "sum without its dimension": [("sum(dim=-1, keepdim=True)", "sum(dim=-1)")],
        "in float32": [("scores - largest", "scores.float() - largest.float()")],
        "over the rows": [("max(dim=-1", "max(dim=-2"), ("sum(dim=-1", "sum(dim=-2")],
        "maxima of the first matrix": [("values", "values[:1]")],
        "scores overwritten": [("scores - largest", "scores.sub_(largest)")],
        "no gradient through the sum": [("/ weights.sum", "/ weights.detach().sum")],
        "no gradient": [("scores - largest", "scores.detach() - largest")],
    },
    "my_attention": {
        "not scaled": [(" / q.shape[-1] ** 0.5", "")],
        "root of the number of keys": [("q.shape[-1]", "k.shape[-2]")],
        "contiguous heads": [("q @", "q.view(-1, *q.shape[-2:]).view(q.shape) @")],
        "always causal": [("if is_causal", "if True")],
        "never causal": [("if is_causal", "if False")],
        "not itself": [("> queries", ">= queries")],
        "places on the CPU": [("arange(k.shape[-2], device=q.device)", "arange(k.shape[-2])")],
        "ends aligned": [("> queries", "> queries + k.shape[-2] - q.shape[-2]")],
        "hidden scores 0": [("-torch.inf", "0.0")],
        "masked after the softmax": [
            (
                "        scores = scores.masked_fill(hidden, -torch.inf)\n",
                "        return my_softmax(scores).masked_fill(hidden, 0) @ v\n",
            ),
        ],
        "as many keys as queries": [("arange(k.", "arange(q.")],
        "no heads": [("k.mT", "k.transpose(1, 2)")],
        "over the queries": [("my_softmax(scores)", "my_softmax(scores.mT).mT")],
    },
}
