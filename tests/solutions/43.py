"""Solutions of notebook 43's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "rows_of": [
        """
def rows_of(full, rank, ranks):
    rows = -(-len(full) // ranks)
    mine = full.new_zeros(rows, *full.shape[1:])
    there = full[rank * rows : (rank + 1) * rows]
    mine[: len(there)] = there
    return mine
""",
        """
def rows_of(full, rank, ranks):
    rows = -(-len(full) // ranks)
    missing = rows * ranks - len(full)
    padded = torch.cat([full, full.new_zeros(missing, *full.shape[1:])])
    return padded.split(rows)[rank].clone()
""",
    ],
    "ShardedModule": [
        """
class ShardedModule(torch.nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, kinds = module, (model.Linear, model.Embedding)
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
        layers = [each for each in module.modules() if isinstance(each, kinds)]
        self.weights = [Weight(each, compute_dtype) for each in layers]
        shards = {weight.shard for weight in self.weights}
        self.replicated = [p for p in module.parameters() if p not in shards]

    def forward(self, *inputs):
        return self.module(*inputs)

    def gather_full_parameters(self):
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        full = {names[parameter]: parameter.detach() for parameter in self.replicated}
        for weight in self.weights:
            shard = weight.shard.detach()
            parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, shard)
            full[names[weight.shard]] = torch.cat(parts)[: len(weight.whole)]
        return full
""",
        """
class ShardedModule(torch.nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, kinds = module, (model.Linear, model.Embedding)
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
        layers = [each for each in module.modules() if isinstance(each, kinds)]
        self.weights = [Weight(each, compute_dtype) for each in layers]
        shards = {weight.shard for weight in self.weights}
        self.replicated = [p for p in module.parameters() if p not in shards]

    def forward(self, *inputs):
        return self.module(*inputs)

    def gather_full_parameters(self):
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        full = {names[parameter]: parameter.detach() for parameter in self.replicated}
        for weight in self.weights:
            padded = weight.shard.data.repeat(dist.get_world_size(), 1)
            all_gather(padded, weight.shard.data)
            full[names[weight.shard]] = padded.narrow(0, 0, len(weight.whole))
        return full
""",
    ],
    "ForwardFSDP": [
        """
class ForwardFSDP(HookedModule):
    def start_gather(self, weight):
        weight.all_rows.untyped_storage().resize_(weight.nbytes)
        weight.sent = weight.shard.data.to(weight.all_rows.dtype)
        weight.work = all_gather(weight.all_rows, weight.sent, async_op=True)

    def collect(self, wanted):
        for weight in wanted:
            if weight.work is None:
                self.start_gather(weight)
        wanted[0].work.wait()
        wanted[0].sent = None
""",
        """
class ForwardFSDP(HookedModule):
    def start_gather(self, weight):
        rows, shard = weight.all_rows, weight.shard.detach()
        rows.untyped_storage().resize_(weight.nbytes)
        weight.sent = shard.type(rows.dtype)
        weight.work = all_gather(rows, weight.sent, async_op=True)

    def collect(self, wanted):
        first = wanted[0]
        for missing in [weight for weight in wanted if not weight.work]:
            self.start_gather(missing)
        torch.futures.wait_all([first.work.get_future()])
        first.sent = None
""",
    ],
    "ShortFSDP": [
        """
class ShortFSDP(BackwardFSDP):
    def reduce(self, weight):
        self.wait_for_reductions(left=1)
        padded = weight.whole.grad.new_zeros(weight.all_rows.shape)
        padded[: len(weight.whole)] = weight.whole.grad
        padded /= dist.get_world_size()
        weight.whole.grad = None
        weight.free()
        mine = torch.empty_like(weight.shard, dtype=padded.dtype)
        work = reduce_scatter(mine, padded, async_op=True)
        self.reductions.append((weight, mine, padded, work))

    def wait_for_reductions(self, left):
        while len(self.reductions) > left:
            weight, mine, _, work = self.reductions.pop(0)
            work.wait()
            weight.shard.grad = mine.to(weight.shard.dtype)
""",
        """
class ShortFSDP(BackwardFSDP):
    def reduce(self, weight):
        self.wait_for_reductions(left=1)
        gradient = weight.whole.grad.div(dist.get_world_size())
        weight.whole.grad = None
        weight.free()
        missing = len(weight.all_rows) - len(gradient)
        sent = torch.cat([gradient, gradient.new_zeros(missing, gradient.shape[1])])
        received = sent.new_empty(weight.shard.shape)
        handle = reduce_scatter(received, sent, async_op=True)
        self.reductions += [(handle, weight.shard, received, sent)]

    def wait_for_reductions(self, left):
        for _ in range(len(self.reductions) - left):
            handle, shard, received, _sent = self.reductions.pop(0)
            handle.wait()
            shard.grad = received.type_as(shard)
""",
    ],
    "MyFSDP": [
        """
class MyFSDP(ShortFSDP):
    def before_forward(self, weight):
        if weight not in self.order:
            self.order.append(weight)
        here = self.order.index(weight)
        self.collect(self.order[here : here + 3])
        weight.layer.weight = weight.whole

    def before_backward(self, weight):
        end = self.order.index(weight) + 1
        self.collect(self.order[max(end - 3, 0) : end][::-1])
""",
        """
class MyFSDP(ShortFSDP):
    def before_forward(self, weight):
        self.order = list(dict.fromkeys([*self.order, weight]))
        self.collect(self.order[self.order.index(weight) :][:3])
        weight.layer.weight = weight.whole

    def before_backward(self, weight):
        done = self.order[::-1]
        self.collect(done[done.index(weight) :][:3])
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "rows_of": {
        "a slice": [("return mine", "return there")],
        "a slice where nothing is missing": [
            ("return mine", "return there if len(there) == rows else mine")
        ],
        "one row too many": [("-(-len(full) // ranks)", "len(full) // ranks + 1")],
        "by turns": [("full[rank * rows : (rank + 1) * rows]", "full[rank::ranks]")],
        "padding as it comes": [("full.new_zeros", "full.new_empty")],
        "always float32": [("full.new_zeros", "torch.zeros")],
    },
    "ShardedModule": {
        "with the padding": [("[: len(weight.whole)]", "")],
        "this rank's rows": [("torch.cat(parts)[: len(weight.whole)]", "shard")],
        "the shard is whole": [
            (
                "        return full",
                "            weight.shard.data = full[names[weight.shard]]\n        return full",
            )
        ],
        "keeps them": [("        return full", "        self.full = full\n        return full")],
    },
    "ForwardFSDP": {
        "does not wait": [("        wanted[0].work.wait()\n", "")],
        "asks again": [("if weight.work is None", "if True")],
        "waits for all": [
            (
                "wanted[0].work.wait()",
                "for weight in wanted:\n            weight.work.wait()",
            )
        ],
        "keeps what was sent": [("        wanted[0].sent = None\n", "")],
        "asks for the first alone": [("for weight in wanted:", "for weight in wanted[:1]:")],
        "another tensor each time": [
            (
                "untyped_storage().resize_(weight.nbytes)",
                "data = weight.whole.data = torch.empty_like(weight.all_rows)",
            )
        ],
    },
    "ShortFSDP": {
        "all whole gradients until the end": [
            ("while len(self.reductions) > left", "while self.reductions and not left")
        ],
        "the sum": [("        padded /= dist.get_world_size()\n", "")],
        "the whole gradient stays": [("        weight.whole.grad = None\n", "")],
        "always two ranks": [("padded /= dist.get_world_size()", "padded /= 2")],
        "padding as it comes": [("grad.new_zeros(", "grad.new_empty(")],
        "the whole gradient until the wait": [
            ("        weight.whole.grad = None\n", ""),
            ("work.wait()\n", "work.wait()\n            weight.whole.grad = None\n"),
        ],
        "waits at once": [(", padded, work))", ", padded, work))\n        work.wait()")],
        "does not wait": [("            work.wait()\n", "")],
    },
    "MyFSDP": {
        "none ahead": [("here + 3", "here + 1")],
        "three ahead": [("here + 3", "here + 4")],
        "none ahead in backward": [("end - 3", "end - 1")],
        "a barrier": [("here + 3])\n", "here + 3])\n        dist.barrier()\n")],
        "backward waits for the next": [
            ("[::-1])\n", "[::-1])\n        self.order[max(end - 2, 0)].work.wait()\n")
        ],
        "in the order of definition": [("self.order.append(weight)", "self.order = self.weights")],
    },
}
