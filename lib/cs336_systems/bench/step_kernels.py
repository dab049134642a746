"""The fused kernels of a training step beside PyTorch's operations, its compiler and Liger-Kernel's kernels.

for rows in sweep_step_kernels(LEADERBOARD, num_tokens=[32_768]):
    save_rows(rows, "leaderboard", "step_kernel_times")
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from cs336_systems.accounting.step_kernel_costs import chip_of, kernel_shape, least_work
from cs336_systems.arguments import check_choice
from cs336_systems.checks.fused_checks import FUSED, check_fused, fused_kernel
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import torch_dtype
from cs336_systems.kernels import why_no_triton
from labbook import timing
from labbook.machine import why_no_compile
from labbook.rows import measured_in_order
from labbook.timing import Timing, one_line, time_cold_cache

# The fused kernels of a training step, and what they are compared with.
IMPLEMENTATIONS = ("eager", "compiled", "liger", "triton")
PASSES = ("forward", "forward_backward")
CHECKED_TOKENS = 256  # float64 logits of many more would not fit


def sweep_step_kernels(
    config: ModelConfig,
    *,
    num_tokens: Sequence[int],
    kernels: Sequence[str] = tuple(FUSED),
    implementations: Sequence[str] = IMPLEMENTATIONS,
    dtypes: Sequence[str] = ("bfloat16",),
) -> Iterator[list[dict[str, Any]]]:
    """Check, then time every combination with a cold cache; yields rows of step_kernel_times.

    What is short runs from a CUDA graph.

    Raises:
        ValueError: a name is unknown.
    """
    device = timing.resolve_device()
    for kernel in kernels:
        check_choice("kernel", kernel, FUSED)
    for name in implementations:
        check_choice("implementation", name, IMPLEMENTATIONS)
    for kernel, dtype, name, tokens in itertools.product(kernels, dtypes, implementations, num_tokens):
        key = {"kernel": kernel, "implementation": name, "edition": config.edition, "model_size": config.name}
        key |= {"num_rows": tokens, "dtype": dtype}
        shape = kernel_shape(kernel, config, tokens)
        row = partial(_row, kernel, name, shape, dtype, device=device)
        yield measured_in_order(lambda row=row, key=key: [key | {"pass": p} | row(pass_=p) for p in PASSES])
        timing.release_memory(device)


def _row(
    kernel: str, name: str, shape: tuple[int, ...], dtype: str, pass_: str, device: torch.device
) -> dict:
    measure = partial(_time, kernel, name, shape, dtype, pass_, device)
    timed = timing.timing_or_status(measure, device, _why_not(name, device))
    work = least_work(kernel, shape, torch_dtype(dtype).itemsize, backward=pass_ != "forward")
    row = {"moved_mb": work.moved_bytes / 1e6, "gflop": work.flops / 1e9} | timed.as_row()
    chip = chip_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if chip and timed.status == "ok" and torch_dtype(dtype).itemsize == 2:
        limit_ms = 1e3 * work.seconds(chip)
        row |= {"limit_ms": limit_ms, "limit_share": limit_ms / timed.p50_ms}
    return row


def _why_not(name: str, device: torch.device) -> str:
    if name == "liger":
        found = find_spec("liger_kernel") is not None and device.type == "cuda"
        return "" if found else "needs a GPU, and liger-kernel installed"
    return {"compiled": why_no_compile, "triton": why_no_triton}.get(name, lambda device: "")(device)


def _function(kernel: str, name: str) -> Callable[..., torch.Tensor]:
    if name == "compiled":
        torch._dynamo.reset()
        return torch.compile(FUSED[kernel].plain, dynamic=False)
    if name != "liger":
        return fused_kernel(kernel) if name == "triton" else FUSED[kernel].plain
    from liger_kernel.transformers import functional as liger

    return {
        "rms_norm": partial(liger.liger_rms_norm, eps=1e-5, in_place=False),
        # It turns q and k, here a single head, at once, and the pairs (j, j + d / 2).
        "rotary": lambda x, cos, sin: liger.liger_rope(x, x[:, :1].detach(), cos[None], sin[None])[0],
        "swiglu": liger.liger_swiglu,
        "linear_cross_entropy": partial(liger.liger_fused_linear_cross_entropy, accum_dtype=torch.float32),
    }[kernel]


def _time(
    kernel: str, name: str, shape: tuple[int, ...], dtype: str, pass_: str, device: torch.device
) -> Timing:
    function, own = _function(kernel, name), FUSED[kernel]
    inputs = own.inputs(shape, torch_dtype(dtype), torch.Generator(device))
    if kernel == "rotary":
        inputs[0] = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)  # as the model's projections lie
    if (kernel, name) == ("rotary", "liger"):  # other pairs, so other results; as many bytes
        inputs[1:] = [torch.cat((table, table), -1)[: shape[-2]] for table in inputs[1:]]
    else:
        tokens = 2 if kernel == "rotary" else 0
        few = (*shape[:tokens], min(shape[tokens], CHECKED_TOKENS), *shape[tokens + 1 :])
        try:
            check_fused(kernel, function, shapes=[few], dtype=torch_dtype(dtype), device=device)
        except AssertionError as error:
            return Timing(status="error", reason=one_line(error))
    step = partial(function, *inputs)
    if pass_ != "forward":
        graded = [
            x.requires_grad_() for tensor, x in zip(own.tensors, inputs, strict=True) if tensor.islower()
        ]
        d_output = torch.randn_like(step())
        step = partial(_forward_backward, step, graded, d_output)
    if device.type == "cuda" and kernel != "linear_cross_entropy":
        step = _captured(step)
    return time_cold_cache(step, device=device)


def _forward_backward(
    step: Callable[[], torch.Tensor], graded: list[torch.Tensor], d_output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(step(), graded, d_output)


def _captured(step: Callable[[], Any]) -> Callable[[], None]:
    """The step as a CUDA graph: in training the host is far ahead, and here it would be what is timed."""
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
