"""Solutions of notebook 35's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "ShortOverlap": [
        """
class ShortOverlap(Replica):
    def __init__(self, module):
        super().__init__(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, parameter):
        parameter.grad.div_(dist.get_world_size())
        handle = dist.all_reduce(parameter.grad, async_op=True)
        self.handles.append(handle)

    def finish_gradient_synchronization(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
""",
        """
class ShortOverlap(Replica):
    def __init__(self, module):
        super().__init__(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, parameter):
        parameter.grad = parameter.grad / dist.get_world_size()
        self.handles += [dist.all_reduce(parameter.grad, async_op=True)]

    def finish_gradient_synchronization(self):
        started, self.handles = self.handles, []
        for handle in started[::-1]:
            handle.wait()
""",
    ],
    "OrderedOverlap": [
        """
class OrderedOverlap(InOrder):
    def on_gradient(self, parameter):
        self.ready.add(parameter)
        for following in self.order[len(self.handles) :]:
            if following not in self.ready:
                break
            self.send_next()

    def send_next(self):
        parameter = self.order[len(self.handles)]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        super().on_gradient(parameter)
""",
        """
class OrderedOverlap(InOrder):
    def on_gradient(self, parameter):
        self.ready.add(parameter)
        while self.ready.intersection(self.order[len(self.handles) :][:1]):
            self.send_next()

    def send_next(self):
        following = self.order[len(self.handles)]
        if following.grad is None:
            following.grad = following.new_zeros(following.shape)
        super().on_gradient(following)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "ShortOverlap": {
        "waits in the hook": [("self.handles.append(handle)", "handle.wait()")],
        "sends after backward": [
            (
                "        handle = dist.all_reduce(parameter.grad, async_op=True)\n"
                "        self.handles.append(handle)\n",
                "",
            ),
            (
                "        for handle in self.handles:\n            handle.wait()\n",
                "        for parameter in self.module.parameters():\n"
                "            if parameter.grad is not None:\n"
                "                dist.all_reduce(parameter.grad)\n",
            ),
        ],
        "divides what is on its way": [
            ("        parameter.grad.div_(dist.get_world_size())\n", ""),
            (
                "append(handle)\n",
                "append(handle)\n        parameter.grad.div_(dist.get_world_size())\n",
            ),
        ],
        "waits for its future": [("self.handles.append(handle)", "handle.get_future().wait()")],
        "the mean of three": [("dist.get_world_size()", "3")],
        "asks until it is there": [
            (
                "append(handle)\n",
                "append(handle)\n        while not handle.is_completed():\n            pass\n",
            )
        ],
        "waits for the last": [("in self.handles:", "in self.handles[-1:]:")],
        "keeps the handles": [("        self.handles.clear()\n", "")],
    },
    "OrderedOverlap": {
        "the next one, ready or not": [
            (
                "        for following in self.order[len(self.handles) :]:\n"
                "            if following not in self.ready:\n"
                "                break\n"
                "            self.send_next()",
                "        self.send_next()",
            )
        ],
        "one behind": [
            ("        self.ready.add(parameter)\n", ""),
            ("    def send", "        self.ready.add(parameter)\n\n    def send"),
        ],
        "leaves out what is not ready": [("break", "continue")],
        "one for each gradient": [("self.send_next()", "self.send_next()\n            break")],
        "all at the end": [("self.order[len(self.handles) :]", "[]")],
        "no zeros for what is not used": [("torch.zeros_like(parameter)", "None")],
    },
}
