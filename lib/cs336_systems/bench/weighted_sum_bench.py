"""Benchmarks of the weighted sum: our kernels, PyTorch's operations, its compiler, a matmul."""

import itertools
from collections.abc import Callable, Iterable, Iterator
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
from cs336_systems.names import DTYPES, WEIGHTED_SUMS, check_choice, torch_dtype

PASSES = ("forward", "backward")


def eager(x: Tensor, weight: Tensor) -> Tensor:
    """The formula, x * weight written to memory."""
    return (x * weight).sum(-1)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """The same as a matrix times a vector."""
    return x @ weight


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": eager,
    "compiled": eager,
    "matmul": matmul,
    "triton": weighted_sum,
    "triton_descriptor": forward_from_descriptor,
}


def sweep_weighted_sum(
    *,
    num_rows: Iterable[int],
    d_model: int,
    implementations: Iterable[str] = tuple(WEIGHTED_SUMS),
    passes: Iterable[str] = PASSES,
    dtypes: Iterable[str] = ("float32",),
    device: str | torch.device = "auto",
) -> Iterator[list[dict[str, Any]]]:
    """Time every combination with a cold cache; yields rows of table weighted_sum_times.

    Args:
        num_rows: of x (num_rows, d_model).

    Raises:
        ValueError: a name is unknown. RuntimeError: the device is not there.
    """
    implementations, passes, dtypes = tuple(implementations), tuple(passes), tuple(dtypes)
    for what, given, allowed in (
        ("implementation", implementations, WEIGHTED_SUMS),
        ("pass", passes, PASSES),
        ("dtype", dtypes, [dtype for dtype in DTYPES if dtype != "tf32"]),
    ):
        for name in given:
            check_choice(what, name, allowed)
    device = resolve_device(device)
    for dtype, name, rows in itertools.product(dtypes, implementations, tuple(num_rows)):
        key = {"implementation": name, "num_rows": rows, "d_model": d_model, "dtype": dtype}
        yield [
            key | {"pass": pass_} | _benchmark(name, (rows, d_model), dtype, pass_, device)
            for pass_ in passes
        ]


def _benchmark(
    name: str, shape: tuple[int, int], dtype: str, pass_: str, device: torch.device
) -> dict[str, Any]:
    if reason := _why_not(name, pass_, device):
        timing = Timing(status="skipped", reason=reason)
    else:
        timing, reason = run_or_out_of_memory(lambda: _time(name, shape, dtype, pass_, device), device)
        release_memory(device)
        timing = timing or Timing(status="oom", reason=reason)
    values = timing.as_row()
    values.pop("compile_s")
    return values


def _why_not(name: str, pass_: str, device: torch.device) -> str:
    if name == "triton_descriptor" and pass_ == "backward":
        return "written for the forward pass only"
    if name == "compiled":
        return why_no_compile(device)
    return why_no_triton(device) if name.startswith("triton") else ""


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
