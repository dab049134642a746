"""Solutions of notebook 34's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "flat_gain_s": [
        """
def flat_gain_s(count, total_bytes, start_s, copy_bytes_per_s):
    starts = (count - 1) * start_s
    copies = 4 * total_bytes / copy_bytes_per_s
    return starts - copies
""",
        """
def flat_gain_s(count, total_bytes, start_s, copy_bytes_per_s):
    gather = scatter = 2 * total_bytes / copy_bytes_per_s
    naive, flat = count * start_s, start_s + gather + scatter
    return naive - flat
""",
    ],
    "MyFlatDDP": [
        """
class MyFlatDDP(parallel.NaiveDDP):
    def finish_gradient_synchronization(self):
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        at = 0
        for gradient in gradients:
            part = flat[at : at + gradient.numel()]
            gradient.copy_(part.view_as(gradient))
            at += gradient.numel()
""",
        """
class MyFlatDDP(parallel.NaiveDDP):
    def finish_gradient_synchronization(self):
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        parts = torch._utils._unflatten_dense_tensors(flat, gradients)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[...] = part / dist.get_world_size()
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "flat_gain_s": {
        "one message starts for nothing": [("(count - 1)", "count")],
        "gathered, not scattered": [("4 *", "2 *")],
        "copies for each message": [("4 *", "4 * count *")],
        "never negative": [("starts - copies", "max(starts - copies, 0)")],
        "the loss": [("starts - copies", "copies - starts")],
    },
    "MyFlatDDP": {
        "a message for each gradient": [
            (
                "        dist.all_reduce(flat)",
                "        for part in flat.split([gradient.numel() for gradient in gradients]):\n"
                "            dist.all_reduce(part)",
            )
        ],
        "there and back": [
            ("dist.all_reduce(flat)", "dist.reduce(flat, 0)\n        dist.broadcast(flat, 0)")
        ],
        "the mean is not copied back": [("gradient.copy_(part", "gradient = (part")],
        "the first part for all": [("            at += gradient.numel()\n", "")],
        "last gradient first": [("for gradient in gradients:", "for gradient in gradients[::-1]:")],
    },
}
