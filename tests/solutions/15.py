"""Solutions of notebook 15's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "kept_by_block": [
        """
def kept_by_block(B, T, D, F, H):
    numbers = B * T * (10 * D + 5 * F + 2) + B * H * T * (2 * T + 1)
    return 4 * numbers + T * T
""",
        """
def kept_by_block(B, T, D, F, H):
    norms = 2 * (2 * D + 1)
    attention = 5 * D + H * (2 * T + 1)
    swiglu = D + 5 * F
    return T**2 + 4 * B * T * (norms + attention + swiglu)
""",
    ],
    "peak_of_step": [
        """
def peak_of_step(parameters, kept, logits, largest):
    loss = 3 * parameters + kept + 3 * logits
    optimizer = 4 * parameters + largest
    return max(loss, optimizer)
""",
        """
def peak_of_step(parameters, kept, logits, largest):
    return 3 * parameters + max(parameters + largest, kept + 3 * logits)
""",
    ],
    "snapshot_of": [
        """
def snapshot_of(run):
    history = torch.cuda.memory
    try:
        history._record_memory_history(stacks="python")
        run()
        torch.cuda.synchronize()
        found = history._snapshot()
    finally:
        history._record_memory_history(enabled=None)
    return found
""",
        """
from contextlib import ExitStack


def snapshot_of(run):
    with ExitStack() as after:
        torch.cuda.memory._record_memory_history("all", stacks="python")
        after.callback(torch.cuda.memory._record_memory_history, None)
        run()
        torch.cuda.synchronize()
        return torch.cuda.memory._snapshot()
""",
    ],
    "peak_of_trace": [
        """
def peak_of_trace(events, before=0):
    held = peak = before
    for event in events:
        if event["action"] == "alloc":
            held += event["size"]
        elif event["action"] == "free_requested":
            held -= event["size"]
        peak = max(peak, held)
    return peak
""",
        """
from itertools import accumulate


def peak_of_trace(events, before=0):
    sign = {"alloc": 1, "free_requested": -1}
    changes = [sign.get(event["action"], 0) * event["size"] for event in events]
    return max(accumulate(changes, initial=before))
""",
    ],
    "saved_bytes": [
        """
def saved_bytes(module, x):
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
    own = [*module.parameters(), *module.buffers()]
    there = {tensor.untyped_storage().data_ptr() for tensor in own}
    return sum(size for address, size in kept.items() if address not in there)
""",
        """
def saved_bytes(module, x):
    saved = []

    def pack(tensor):
        saved.append(tensor.detach())
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
        module(x)
    storages = {s.data_ptr(): s for s in [t.untyped_storage() for t in saved]}
    for own in [*module.parameters(), *module.buffers()]:
        storages.pop(own.untyped_storage().data_ptr(), None)
    return sum(s.nbytes() for s in storages.values())
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "kept_by_block": {
        "mask of four bytes": [("+ T * T", "+ 4 * T * T")],
        "no exponentials": [("2 * T + 1", "T + 1")],
        "no heads": [("B * H * T", "B * T")],
        "input of q, k and v thrice": [("10 * D", "12 * D")],
        "no sigmoid": [("5 * F", "4 * F")],
        "1/rms of one norm": [("F + 2", "F + 1")],
        "numbers, not bytes": [("4 * numbers", "numbers")],
    },
    "peak_of_step": {
        "the sum": [("max(loss, optimizer)", "loss + optimizer")],
        "one temporary of logits": [("3 * logits", "logits")],
        "no gradients": [("4 * parameters", "3 * parameters")],
        "gradients at the loss": [("3 * parameters", "4 * parameters")],
        "no temporary in the optimizer": [(" + largest", "")],
    },
    "snapshot_of": {
        "stays on": [("enabled=None", "")],
        "stays on after an error": [("try:", "if run:"), ("    finally:\n", "")],
        "off, which clears it, too early": [
            ("found =", "history._record_memory_history(None)\n        found =")
        ],
        "snapshot before the run": [
            ("        run()\n", ""),
            ("_snapshot()", "_snapshot()\n        run()"),
        ],
        "on after the run": [("        run()\n", ""), ("    try:", "    run()\n    try:")],
        "no stacks": [('stacks="python"', "context=None")],
        "one event": [('"python"', '"python", max_entries=1')],
    },
    "peak_of_trace": {
        "free_completed": [("free_requested", "free_completed")],
        "both frees": [('["action"] == "free_requested"', '["action"].startswith("free")')],
        "segments, too": [('event["action"] == "alloc"', '"alloc" in event["action"]')],
        "before forgotten": [("peak = before", "peak = 0")],
        "peak begins at 0": [("peak = before", "before\n    peak = 0")],
        "what is held at the end": [("return peak", "return held")],
        "never below 0": [("peak = max", "held = max(held, 0)\n        peak = max")],
    },
    "saved_bytes": {
        "views twice": [("] = ", "] = kept.get(storage.data_ptr(), 0) + ")],
        "a view's address": [("kept[storage", "kept[tensor")],
        "a view's bytes": [("storage.nbytes()", "tensor.nbytes")],
        "parameters": [(" if address not in there", "")],
        "buffers": [(", *module.buffers()", "")],
        "eval mode": [("own = [", "module.eval()\n    own = [")],
        "parameters never saved, off": [
            (" if address not in there)", ") - sum(t.nbytes for t in own)")
        ],
        "last call's, too": [("x):\n    kept = {}", "x, kept={}):")],
    },
}
