"""Benchmarks of the weighted sum: our kernels, PyTorch's operations, its compiler, a matmul."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336_systems.kernels.weighted_sum import forward_from_descriptor, weighted_sum
from cs336_systems.measure import (
    Timing,
    release_memory,
    resolve_device,
    run_or_out_of_memory,
    time_cold_cache,
    why_no_compile,
    why_no_triton,
)
from cs336_systems.names import WEIGHTED_SUMS, check_choice, torch_dtype

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
    implementations: Sequence[str] = tuple(WEIGHTED_SUMS),
    passes: Sequence[str] = PASSES,
    dtypes: Sequence[str] = ("float32",),
    device: str | torch.device = "auto",
) -> Iterator[list[dict[str, Any]]]:
    """Time every combination with a cold cache; yields rows of table weighted_sum_times.

    Args:
        num_rows: of x (num_rows, d_model).

    Raises:
        ValueError: a name is unknown. RuntimeError: the device is not there.
    """
    device = resolve_device(device)
    for name in implementations:
        check_choice("implementation", name, WEIGHTED_SUMS)
    for pass_ in passes:
        check_choice("pass", pass_, PASSES)
    for dtype, name, rows in itertools.product(dtypes, implementations, num_rows):
        key = {"implementation": name, "num_rows": rows, "d_model": d_model, "dtype": dtype}
        yield [
            key | {"pass": pass_} | _benchmark(name, (rows, d_model), dtype, pass_, device)
            for pass_ in passes
        ]


def _benchmark(
    name: str, shape: tuple[int, int], dtype: str, pass_: str, device: torch.device
) -> dict[str, Any]:
    reason = why_no_compile(device) if name == "compiled" else ""
    if name.startswith("triton"):
        reason = why_no_triton(device)
    if (name, pass_) == ("triton_descriptor", "backward"):
        reason = "written for the forward pass only"
    if reason:
        return Timing(status="skipped", reason=reason).as_row()
    timing, reason = run_or_out_of_memory(lambda: _time(name, shape, dtype, pass_, device), device)
    release_memory(device)
    return (timing or Timing(status="oom", reason=reason)).as_row()


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
