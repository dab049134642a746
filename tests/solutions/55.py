"""Solutions of notebook 55's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "slice_of": [
        """
def slice_of(weight, name, rank, ranks):
    dimension = 1 if name == "w2" else 0
    size = weight.shape[dimension] // ranks
    return weight.narrow(dimension, rank * size, size)
""",
        """
def slice_of(weight, name, rank, ranks):
    if name == "w2":
        return weight.tensor_split(ranks, 1)[rank]
    return weight.tensor_split(ranks)[rank]
""",
    ],
    "Sum": [
        """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
""",
        """
def added_up(x, group):
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    torch.distributed.all_reduce(total, group=group)
    return total


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return added_up(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return added_up(grad, ctx.group), None
""",
    ],
    "TensorParallelSwiGLU": [
        """
class TensorParallelSwiGLU(torch.nn.Module):
    def __init__(self, full, group=None):
        super().__init__()
        self.group = group
        place = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        for name in ("w1", "w2", "w3"):
            piece = slice_of(getattr(full, name).weight.detach(), name, *place)
            setattr(self, name, torch.nn.Parameter(piece.clone()))

    def forward(self, x):
        x = SumGradient.apply(x, self.group)
        gate, up = x @ self.w1.T, x @ self.w3.T
        hidden = torch.nn.functional.silu(gate) * up
        return Sum.apply(hidden @ self.w2.T, self.group)
""",
        """
class TensorParallelSwiGLU(torch.nn.Module):
    def __init__(self, full, group=None):
        super().__init__()
        self.group = group
        rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        for name in ("w1", "w2", "w3"):
            piece = slice_of(getattr(full, name).weight.detach(), name, rank, ranks)
            setattr(self, name, torch.nn.Parameter(piece.clone()))

    def forward(self, x):
        linear = torch.nn.functional.linear
        whole = SumGradient.apply(x, self.group)
        gate = linear(whole, self.w1)
        term = linear(gate * gate.sigmoid() * linear(whole, self.w3), self.w2)
        return Sum.apply(term, self.group)
""",
    ],
    "sequence_bytes": [
        """
def sequence_bytes(pass_):
    gather = 2 * B * D * (N - 1) / N
    return 3 * gather if pass_ == "backward" else 2 * gather
""",
        """
def sequence_bytes(pass_):
    return all_reduce + (all_reduce / 2 if pass_ == "backward" else 0)
""",
    ],
    "GatherLinear": [
        """
class GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        whole = gathered(x, group)
        return whole @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        d_weight = grad.T @ gathered(x, ctx.group)
        d_x = scattered(grad @ weight, ctx.group)
        return d_x, d_weight, None
""",
        """
class GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(gathered(x, group), weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        d_x = scattered(grad.mm(weight), ctx.group)
        return d_x, torch.einsum("bf,bd->fd", grad, gathered(x, ctx.group)), None
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "slice_of": {
        "the longer side": [('name == "w2"', "weight.shape[0] < weight.shape[1]")],
        "w3 like w2": [('name == "w2"', 'name != "w1"')],
        "from the end": [("rank * size", "(ranks - 1 - rank) * size")],
        "every ranks-th feature": [
            (
                "narrow(dimension, rank * size, size)",
                "unflatten(dimension, (size, ranks)).select(dimension + 1, rank)",
            )
        ],
    },
    "Sum": {
        "adds in place": [("x.contiguous().clone()", "x.contiguous()")],
        "gradient added in place": [("grad.contiguous().clone()", "grad")],
        "gradient of the sum added up": [
            ("return grad, None", "return SumGradient.backward(ctx, grad)"),
            ("total = x.cont", "ctx.group = group\n        total = x.cont"),
        ],
        "gradient of the input not added up": [
            ("        torch.distributed.all_reduce(total, group=ctx.group)\n", "")
        ],
        "all ranks, whatever group": [("total, group=group", "total")],
        "backward: all ranks": [("total, group=ctx.group", "total")],
    },
    "TensorParallelSwiGLU": {
        "terms not added up": [("Sum.apply(hidden @ self.w2.T, self.group)", "hidden @ self.w2.T")],
        "input's gradient not added up": [("SumGradient.apply(x, self.group)", "x")],
        "sums exchanged": [
            ("SumGradient.apply(x", "Sum.apply(x"),
            ("Sum.apply(hidden", "SumGradient.apply(hidden"),
        ],
        "a sum for each product": [
            ("        x = SumGradient.apply(x, self.group)\n", ""),
            ("x @ self.w1.T", "SumGradient.apply(x, self.group) @ self.w1.T"),
            ("x @ self.w3.T", "SumGradient.apply(x, self.group) @ self.w3.T"),
        ],
        "all ranks, whatever group": [("self.w2.T, self.group", "self.w2.T, None")],
    },
    "sequence_bytes": {
        "input not gathered again": [("3 * gather", "2 * gather")],
        "numbers, not bytes": [("2 * B * D", "B * D")],
        "its own share, too": [(" * (N - 1) / N", "")],
        "the share that it has": [("(N - 1) / N", "1 / N")],
    },
    "GatherLinear": {
        "keeps the gathered input": [
            ("(x, group)\n", "(x, group)\n        ctx.kept = [whole]\n"),
            ("gathered(x, ctx.group)", "ctx.kept[0]"),
        ],
        "all-reduces, then cuts": [
            (
                "scattered(grad @ weight, ctx.group)",
                "grad @ weight\n        torch.distributed.all_reduce(d_x, group=ctx.group)\n"
                "        d_x = d_x[torch.distributed.get_rank(ctx.group) * len(x) :][: len(x)]",
            )
        ],
        "weight's gradient by its own tokens": [
            ("grad.T @ gathered(x, ctx.group)", "scattered(grad, ctx.group).T @ x")
        ],
        "gathers twice": [("        d_x =", "        gathered(x, ctx.group)\n        d_x =")],
        "weight's gradient added up": [
            (
                "return d_x",
                "torch.distributed.all_reduce(d_weight, group=ctx.group)\n        return d_x",
            )
        ],
        "backward: all ranks": [("ctx.group = group", "ctx.group = None")],
    },
}
