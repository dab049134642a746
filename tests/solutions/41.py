"""Solutions of notebook 41's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "deal": [
        """
def deal(parameters, world_size):
    owners, held = {}, [0] * world_size
    for parameter in sorted(parameters, key=lambda p: p.nbytes, reverse=True):
        rank = min(range(world_size), key=held.__getitem__)
        owners[parameter] = rank
        held[rank] += parameter.nbytes
    return owners
""",
        """
def deal(parameters, world_size):
    loads, owners = [(0, rank) for rank in range(world_size)], {}
    for parameter in sorted(parameters, key=lambda p: p.nbytes)[::-1]:
        load, owners[parameter] = min(loads)
        loads.remove(min(loads))
        loads.append((load + parameter.nbytes, owners[parameter]))
    return owners
""",
    ],
    "ShardedStates": [
        """
class ShardedStates(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **settings):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.optimizer_cls = optimizer_cls
        self.settings = settings
        self.owners = {}
        self.inside = None
        super().__init__(params, settings)

    def add_param_group(self, group):
        super().add_param_group(group)
        dealt = deal(group["params"], self.world_size)
        self.owners.update(dealt)
        inner = dict(group)
        inner["params"] = [p for p in group["params"] if dealt[p] == self.rank]
        if self.inside is None:
            self.inside = self.optimizer_cls([inner], **self.settings)
        else:
            self.inside.add_param_group(inner)

    def step(self, closure=None):
        self.inside.step()
""",
        """
class ShardedStates(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **settings):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.optimizer_cls = optimizer_cls
        self.settings = settings
        self.owners = {}
        self.inside = None
        super().__init__(params, settings)

    def add_param_group(self, group):
        super().add_param_group(group)
        owners = deal(self.param_groups[-1]["params"], self.world_size)
        self.owners = self.owners | owners
        mine = [p for p, owner in owners.items() if owner == self.rank]
        if self.inside:
            self.inside.add_param_group(group | {"params": mine})
        else:
            self.inside = self.optimizer_cls([group | {"params": mine}], **self.settings)

    def step(self, closure=None):
        self.inside.step()
""",
    ],
    "ShortSharded": [
        """
class ShortSharded(ShardedStates):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for outside, inside in zip(self.param_groups, self.inside.param_groups, strict=True):
            for name in outside:
                if name != "params":
                    inside[name] = outside[name]
        self.inside.step()
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter.data, src=owner)
        return loss
""",
        """
class ShortSharded(ShardedStates):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure and closure()
        for group, inner in zip(self.param_groups, self.inside.param_groups, strict=True):
            inner.update(group | {"params": inner["params"]})
        self.inside.step()
        for group in self.param_groups:
            for p in group["params"]:
                dist.broadcast(p.detach(), self.owners[p])
        return loss
""",
    ],
    "AsyncSharded": [
        """
class AsyncSharded(ShardedStates):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for outside, inside in zip(self.param_groups, self.inside.param_groups, strict=True):
            inside.update(outside | {"params": inside["params"]})
        self.inside.step()
        handles = []
        for parameter, owner in self.owners.items():
            handles.append(dist.broadcast(parameter.data, src=owner, async_op=True))
        for handle in handles:
            handle.wait()
        return loss
""",
        """
class AsyncSharded(ShardedStates):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure and closure()
        for group, inner in zip(self.param_groups, self.inside.param_groups, strict=True):
            for name in set(group) - {"params"}:
                inner[name] = group[name]
        self.inside.step()
        started = [dist.broadcast(p.detach(), r, async_op=True) for p, r in self.owners.items()]
        torch.futures.wait_all([work.get_future() for work in started])
        return loss
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "deal": {
        "by turns": [
            ("sorted(parameters, key=lambda p: p.nbytes, reverse=True)", "parameters"),
            ("min(range(world_size), key=held.__getitem__)", "len(owners) % world_size"),
        ],
        "in runs": [
            (
                "min(range(world_size), key=held.__getitem__)",
                "len(owners) * world_size // len(parameters)",
            )
        ],
        "sorts the list it is given": [
            (
                "in sorted(parameters, key=lambda p: p.nbytes, reverse=True)",
                "in parameters.sort(key=lambda p: -p.nbytes) or parameters",
            )
        ],
        "numbers, not bytes": [
            (": p.nbytes", ": p.numel()"),
            ("+= parameter.nbytes", "+= parameter.numel()"),
        ],
    },
    "ShardedStates": {
        "every rank owns all": [(" if dealt[p] == self.rank", "")],
        "ours loses parameters": [("dict(group)", "group")],
        "without the group's learning rate": [("dict(group)", "group | self.settings")],
        "the last group's owners": [("self.owners.update(dealt)", "self.owners = dealt")],
        "a new one of all groups": [
            (
                "self.inside.add_param_group(inner)",
                "inner = [*self.inside.param_groups, inner]\n"
                "            self.inside = self.optimizer_cls(inner, **self.settings)",
            )
        ],
        "owners are its own": [
            ("self.owners.update(dealt)", "self.owners.update(dict.fromkeys(dealt, self.rank))")
        ],
    },
    "ShortSharded": {
        "a closure without gradients": [("torch.enable_grad()", "torch.no_grad()")],
        "no loss": [("        return loss\n", "")],
        "the settings of inside": [
            ("inside[name] = outside[name]", "outside[name] = inside[name]")
        ],
        "sends all twice": [("in self.owners.items()", "in [*self.owners.items()] * 2")],
        "every rank updates all": [('if name != "params"', "if True")],
        "settings without a closure only": [
            ("groups, strict=True)", "groups if closure is None else ())")
        ],
        "sends before the update": [
            ("        self.inside.step()\n", ""),
            ("        return loss", "        self.inside.step()\n        return loss"),
        ],
    },
    "AsyncSharded": {
        "waits for each": [
            (
                "handles.append(dist.broadcast(parameter.data, src=owner, async_op=True))",
                "dist.broadcast(parameter.data, src=owner, async_op=True).wait()",
            )
        ],
        "waits for nobody": [("            handle.wait()", "            pass")],
        "waits for the last": [("in handles:", "in handles[-1:]:")],
        "updates what is on its way": [
            ("        self.inside.step()\n", ""),
            ("        for handle in", "        self.inside.step()\n        for handle in"),
        ],
        "the settings of the beginning": [("inside.update(", "dict(")],
    },
}
