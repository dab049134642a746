"""Benchmarks of the weighted sum: our kernels, PyTorch's operations, its compiler, a matmul."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336_systems.arguments import check_choice
from cs336_systems.dtypes import torch_dtype
from cs336_systems.kernels.weighted_sum import forward_from_descriptor, weighted_sum
from labbook import timing
from labbook.requirements import why_no_compile, why_no_triton
from labbook.timing import Timing, time_cold_cache

PASSES = ("forward", "backward")


def eager(x: Tensor, weight: Tensor) -> Tensor:
    """The formula, x * weight written to memory."""
    return (x * weight).sum(-1)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": eager,
    "compiled": eager,
    "matmul": torch.matmul,
    "triton": weighted_sum,
    "triton_descriptor": forward_from_descriptor,
}


def sweep_weighted_sum(
    *,
    num_rows: Sequence[int],
    d_model: int,
    implementations: Sequence[str] = tuple(FUNCTIONS),
    passes: Sequence[str] = PASSES,
    dtypes: Sequence[str] = ("float32",),
    device: str | torch.device = "auto",
) -> Iterator[list[dict[str, Any]]]:
    """Time every combination over x (num_rows, d_model) with a cold cache; yields rows of weighted_sum_times.

    Raises:
        ValueError: a name is unknown. RuntimeError: the device is not there.
    """
    device = timing.resolve_device(device)
    for name in implementations:
        check_choice("implementation", name, FUNCTIONS)
    for pass_ in passes:
        check_choice("pass", pass_, PASSES)
    for dtype, name, rows in itertools.product(dtypes, implementations, num_rows):
        key = {"implementation": name, "num_rows": rows, "d_model": d_model, "dtype": dtype}
        how = (name, (rows, d_model), dtype)
        yield [key | {"pass": pass_} | _benchmark(*how, pass_, device).as_row() for pass_ in passes]


def _benchmark(name: str, shape: tuple[int, int], dtype: str, pass_: str, device: torch.device) -> Timing:
    reason = why_no_compile(device) if name == "compiled" else ""
    if name.startswith("triton"):
        reason = why_no_triton(device)
    if (name, pass_) == ("triton_descriptor", "backward"):
        reason = "written for the forward pass only"
    timed = timing.timing_or_status(lambda: _time(name, shape, dtype, pass_, device), device, reason)
    timing.release_memory(device)
    return timed


def _time(name: str, shape: tuple[int, int], dtype: str, pass_: str, device: torch.device) -> Timing:
    options = {"device": device, "dtype": torch_dtype(dtype)}
    x, weight = torch.randn(shape, **options), torch.randn(shape[1], **options)
    function = FUNCTIONS[name]
    if name == "compiled":
        # Dynamo gives up, and runs eagerly, on a function compiled for more than eight shapes.
        torch._dynamo.reset()
        function = torch.compile(function, dynamic=False)
    if pass_ == "forward":
        return time_cold_cache(lambda: function(x, weight), device=device)
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    y, dy = function(*inputs), torch.randn(shape[0], **options)
    return time_cold_cache(lambda: y.backward(dy, retain_graph=True), device=device, to_clear=inputs)
