"""Benchmarks of the weighted sum: our kernels, PyTorch's operations, its compiler, a matrix product."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from cs336_systems.kernels.weighted_sum import forward_from_descriptor, weighted_sum
from cs336_systems.measure.cold_cache import time_cold_cache
from cs336_systems.measure.requirements import why_no_compile, why_no_triton
from cs336_systems.measure.timing import (
    Timing,
    release_memory,
    resolve_device,
    run_or_out_of_memory,
)
from cs336_systems.names import check_choice

PASSES = ("forward", "backward")
DTYPES = ("float32", "bfloat16", "float16")


def eager(x: Tensor, weight: Tensor) -> Tensor:
    """The formula, the product written to memory."""
    return (x * weight).sum(-1)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """The same as a product of a matrix and a vector."""
    return x @ weight


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
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
    implementations: Iterable[str] = tuple(IMPLEMENTATIONS),
    passes: Iterable[str] = PASSES,
    dtypes: Iterable[str] = ("float32",),
    device: str | torch.device = "auto",
) -> Iterator[list[dict[str, Any]]]:
    """Time every combination with a cold cache; yields the rows of one implementation and size at a time.

    Args:
        num_rows: of x (num_rows, d_model).

    Raises:
        ValueError: a name is unknown. RuntimeError: the device is not there.
    """
    implementations, passes, num_rows = tuple(implementations), tuple(passes), tuple(num_rows)
    for what, names, allowed in (
        ("implementation", implementations, IMPLEMENTATIONS),
        ("pass", passes, PASSES),
        ("dtype", dtypes, DTYPES),
    ):
        for name in names:
            check_choice(what, name, allowed)
    device = resolve_device(device)
    for dtype, name, rows in itertools.product(dtypes, implementations, num_rows):
        key = {"implementation": name, "num_rows": rows, "d_model": d_model, "dtype": dtype}
        yield [
            key | {"pass": pass_} | _benchmark(name, (rows, d_model), dtype, pass_, device).as_row()
            for pass_ in passes
        ]


def _benchmark(name: str, shape: tuple[int, int], dtype: str, pass_: str, device: torch.device) -> Timing:
    if name == "triton_descriptor" and pass_ == "backward":
        return Timing(status="skipped", reason="written for the forward pass only")
    if name == "compiled" and (reason := why_no_compile(device)):
        return Timing(status="skipped", reason=reason)
    if name.startswith("triton") and (reason := why_no_triton(device)):
        return Timing(status="skipped", reason=reason)

    def measure() -> Timing:
        options = {"device": device, "dtype": getattr(torch, dtype)}
        x, weight = torch.randn(shape, **options), torch.randn(shape[1], **options)
        function = IMPLEMENTATIONS[name]
        if name == "compiled":
            # Dynamo gives up, and runs eagerly, on a function compiled for more than eight shapes.
            torch._dynamo.reset()
            function = torch.compile(function, dynamic=False)
        if pass_ == "forward":
            return time_cold_cache(lambda: function(x, weight), device=device)
        inputs = [x.requires_grad_(), weight.requires_grad_()]
        y, dy = function(*inputs), torch.randn(shape[0], **options)
        return time_cold_cache(lambda: y.backward(dy, retain_graph=True), device=device, to_clear=inputs)

    timing, reason = run_or_out_of_memory(measure, device)
    release_memory(device)
    return timing or Timing(status="oom", reason=reason)
