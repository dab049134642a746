"""Solutions of notebook 37's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "fill": [
        """
def fill(sizes, limit):
    buckets = [[]]
    used = 0
    for index in range(len(sizes) - 1, -1, -1):
        used += sizes[index]
        if used > limit and buckets[-1]:
            buckets.append([])
            used = sizes[index]
        buckets[-1].append(index)
    return buckets
""",
        """
def fill(sizes, limit):
    buckets = [[]]
    used = 0
    for index, size in list(enumerate(sizes))[::-1]:
        if not buckets[-1] or used + size <= limit:
            buckets[-1] += [index]
            used += size
        else:
            buckets += [[index]]
            used = size
    return buckets
""",
    ],
    "MyBuckets": [
        """
class MyBuckets(Buckets):
    def watch(self, bucket):
        sizes = [parameter.numel() for parameter in bucket]
        buffer = bucket[0].new_zeros(sum(sizes))
        pieces = zip(buffer.split(sizes), bucket, strict=True)
        views = [piece.view_as(parameter) for piece, parameter in pieces]
        ready = set()

        def on_gradient(parameter):
            ready.add(parameter)
            if len(ready) < len(bucket):
                return
            ready.clear()
            for each, view in zip(bucket, views, strict=True):
                view.copy_(each.grad)
                each.grad = view
            buffer.div_(dist.get_world_size())
            self.handles.append(dist.all_reduce(buffer, async_op=True))

        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(on_gradient)
""",
        """
class MyBuckets(Buckets):
    def watch(self, bucket):
        sizes = [parameter.numel() for parameter in bucket]
        buffer = bucket[0].new_zeros(sum(sizes))
        pieces = zip(buffer.split(sizes), bucket, strict=True)
        views = [piece.view_as(parameter) for piece, parameter in pieces]
        ready = set()

        def on_gradient(parameter):
            ready.add(parameter)
            if ready.issuperset(bucket):
                for member, view in zip(bucket, views, strict=True):
                    view[...] = member.grad / dist.get_world_size()
                    member.grad = view
                handle = dist.all_reduce(buffer, async_op=True)
                self.handles += [handle]
                ready.clear()

        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(on_gradient)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "fill": {
        "first parameter first": [("range(len(sizes) - 1, -1, -1)", "range(len(sizes))")],
        "an empty bucket before a large one": [(" and buckets[-1]", "")],
        "just full is too full": [("used > limit", "used >= limit")],
        "closed when it is full": [("used > limit", "used - sizes[index] >= limit")],
        "goes on counting": [("            used = sizes[index]\n", "")],
        "its first is not counted": [("used = sizes[index]", "used = 0")],
    },
    "MyBuckets": {
        "waits in the hook": [
            (
                "self.handles.append(dist.all_reduce(buffer, async_op=True))",
                "dist.all_reduce(buffer)",
            )
        ],
        "waits for its future": [("async_op=True))", "async_op=True).get_future().wait())")],
        "nobody can wait": [
            (
                "self.handles.append(dist.all_reduce(buffer, async_op=True))",
                "dist.all_reduce(buffer, async_op=True)",
            )
        ],
        "a message for each gradient": [
            (
                "self.handles.append(dist.all_reduce(buffer, async_op=True))",
                "self.handles.extend(dist.all_reduce(view, async_op=True) for view in views)",
            )
        ],
        "the next step is ready at once": [("            ready.clear()\n", "")],
        "ready with the last in the bucket": [
            ("len(ready) < len(bucket)", "parameter is not bucket[-1]")
        ],
        "the optimizer reads the old gradient": [("                each.grad = view\n", "")],
        "sends a copy": [("all_reduce(buffer,", "all_reduce(buffer.clone(),")],
        "the mean of three": [("dist.get_world_size()", "3")],
    },
}
