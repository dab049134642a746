"""Solutions of notebook 11's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "forward_flops": [
        """
def forward_flops(size, batch_size, context_length):
    n, d = batch_size * context_length, size.d_model
    layer = 8 * n * d * d + 4 * n * context_length * d + 6 * n * d * size.d_ff
    return size.num_layers * layer + 2 * n * d * size.vocab_size
""",
        """
def forward_flops(size, batch_size, context_length):
    d = size.d_model
    weights = size.num_layers * (4 * d * d + 3 * d * size.d_ff) + d * size.vocab_size
    scores = 2 * size.num_layers * context_length * d
    return 2 * batch_size * context_length * (weights + scores)
""",
    ],
    "run_pass": [
        """
def run_pass(pass_, net, optimizer, tokens, targets):
    if pass_ == "forward":
        with torch.no_grad():
            return net(tokens)
    for weight in net.parameters():
        weight.grad = None
    loss = functional.cross_entropy(net(tokens), targets)
    loss.backward()
    if pass_ == "train_step":
        optimizer.step()
    return loss
""",
        """
def run_pass(pass_, net, optimizer, tokens, targets):
    if pass_ == "forward":
        with torch.inference_mode():
            return net(tokens)
    net.zero_grad(set_to_none=True)
    loss = functional.cross_entropy(net(tokens), targets)
    loss.backward()
    if pass_ != "forward_backward":
        optimizer.step()
    return loss
""",
    ],
    "time_steps": [
        """
def time_steps(step, wait, warmup_steps, steps):
    def once():
        wait()
        start = time.perf_counter()
        step()
        wait()
        return 1e3 * (time.perf_counter() - start)

    return [once() for _ in range(warmup_steps + steps)][warmup_steps:]
""",
        """
def time_steps(step, wait, warmup_steps, steps):
    times = []
    wait()
    for i in range(warmup_steps + steps):
        start = time.perf_counter()
        step()
        wait()
        took = time.perf_counter() - start
        if i >= warmup_steps:
            times.append(took * 1000)
    return times
""",
    ],
    "launch_ms": [
        """
def launch_ms(kernels, gpu_ms, us_per_launch, places=1024):
    waited_for = max(0, kernels - places)
    return max(kernels * us_per_launch / 1000, waited_for * gpu_ms / kernels)
""",
        """
def launch_ms(kernels, gpu_ms, us_per_launch, places=1024):
    host_ms = 1e-3 * us_per_launch * kernels
    if kernels <= places:
        return host_ms
    return max(host_ms, gpu_ms - places * gpu_ms / kernels)
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "forward_flops": {
        "the masked half of the scores is left out": [("4 * n * context", "2 * n * context")],
        "scores across the batch": [("4 * n * context_length", "4 * n * n")],
        "a feed-forward of two matmuls": [("6 * n", "4 * n")],
        "no projection of the output": [("8 * n", "6 * n")],
        "a head in each layer": [
            ("layer + 2 * n * d * size.vocab_size", "(layer + 2 * n * d * size.vocab_size)")
        ],
        "no head": [(" + 2 * n * d * size.vocab_size", "")],
    },
    "run_pass": {
        "waits to print the loss": [("loss.backward()", "loss.backward()\n    print(loss)")],
        "waits to copy the logits": [
            ("            return net(tokens)", "            return net(tokens).cpu()")
        ],
        "eval mode, but recorded": [("with torch.no_grad():", "if net.eval():")],
        "gradients pile up": [("weight.grad = None", "pass")],
        "gradients pile up without the optimizer": [
            (
                "    for weight in net.parameters():",
                "    for weight in net.parameters() if pass_ == 'train_step' else ():",
            )
        ],
        "always updates": [('pass_ == "train_step"', "True")],
        "never updates": [("optimizer.step()", "pass")],
        "updates before backward": [
            ("    loss.backward()\n", ""),
            ("    return loss", "    loss.backward()\n    return loss"),
        ],
        "returns a number": [("return loss", "return loss.item()")],
    },
    "time_steps": {
        "no wait before": [("        wait()\n        start", "        start")],
        "no wait after": [("step()\n        wait()", "step()")],
        "looks before it waits": [
            (
                "        wait()\n        return",
                "        end = time.perf_counter()\n        wait()\n        return",
            ),
            ("(time.perf_counter() - start)", "(end - start)"),
        ],
        "seconds": [("1e3 * ", "")],
        "warm-up counts": [("[warmup_steps:]", "")],
        "warm-up taken off the steps": [("warmup_steps + steps", "steps")],
        "the shortest": [("[once()", "sorted([once()"), ("[warmup_steps:]", ")[:steps]")],
        "time of the processor": [
            ("start = time.perf_counter", "start = time.process_time"),
            ("(time.perf_counter", "(time.process_time"),
        ],
    },
    "launch_ms": {
        "one after the other": [("max(kernels", "sum((kernels"), ("/ kernels)", "/ kernels))")],
        "the earlier": [("return max", "return min")],
        "waits for the whole GPU": [("waited_for * gpu_ms / kernels", "gpu_ms")],
        "microseconds": [(" / 1000", "")],
        "simulated": [
            ("return max(", "return max(simulated_launch_ms(kernels, gpu_ms, us_per_launch), ")
        ],
        "always 1,024 places": [("- places", "- 1024")],
        "the GPU's time for each kernel": [(" / kernels", "")],
    },
}
