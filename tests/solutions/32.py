"""Solutions of notebook 32's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "combined": [
        """
def combined(gradients, samples):
    total = sum(samples)
    whole = 0
    for gradient, count in zip(gradients, samples, strict=True):
        whole = whole + gradient * (count / total)
    return whole
""",
        """
def combined(gradients, samples):
    return sum(map(lambda g, n: g * n, gradients, samples)) / sum(samples)
""",
    ],
    "MyDDP": [
        """
class MyDDP(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
""",
        """
class MyDDP(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        handles = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for gradient, handle in zip(gradients, handles, strict=True):
            handle.wait()
            gradient.div_(dist.get_world_size())
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "combined": {
        "shares count alike": [("count / total", "1 / len(samples)")],
        "the plain sum": [(" * (count / total)", "")],
        "not divided": [("count / total", "count")],
        "divided twice": [("count / total", "count / total / len(samples)")],
        "whole numbers": [("count / total", "count // total")],
    },
    "MyDDP": {
        "the sum": [("                parameter.grad /= dist.get_world_size()\n", "")],
        "the mean of three": [("dist.get_world_size()", "3")],
        "the mean is lost": [
            ("                parameter.grad /= dist.get_world_size()\n", ""),
            (
                "dist.all_reduce(parameter.grad)",
                "dist.all_reduce(parameter.grad / dist.get_world_size())",
            ),
        ],
        "starts unequal": [
            ("            dist.broadcast(parameter.data, src=0)", "            pass")
        ],
        "forgets buffers": [("            dist.broadcast(buffer, src=0)", "            pass")],
        "forgets buffers below": [("in module.buffers()", "in module.buffers(recurse=False)")],
        "leaves all if one is missing": [
            (
                "        for parameter in self",
                "        trained = [p for p in self.module.parameters() if p.requires_grad]\n"
                "        if any(p.grad is None for p in trained):\n"
                "            return\n"
                "        for parameter in self",
            )
        ],
        "every trained parameter has a gradient": [
            ("parameter.grad is not None", "parameter.requires_grad")
        ],
    },
}
