"""Benchmarks of attention alone: time of each pass, and the memory held between forward and backward."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from cs336_systems import accounting
from cs336_systems.attention import IMPLEMENTATIONS as ATTENTION
from cs336_systems.attention import attention
from cs336_systems.measure.compiling import time_compiled, why_no_compile, why_no_triton
from cs336_systems.measure.host import check_choice, why_no_memory, why_no_tf32
from cs336_systems.measure.schema import DTYPES
from cs336_systems.measure.timing import (
    MIB,
    Timing,
    matmul_precision,
    release_memory,
    resolve_device,
    run_or_out_of_memory,
    time_steps,
)
from cs336_systems.measure.validation import measured_in_order

COMPILED = ("compiled", "flash_compiled")
_TRITON = ("flash_triton", "flash_compiled")
IMPLEMENTATIONS = (*ATTENTION, *COMPILED)
PASSES = ("forward", "backward", "forward_backward")
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def benchmark_attention(
    *,
    batch_size: int,
    context_length: int,
    d_head: int,
    pass_: str = "forward",
    dtype: str = "float32",
    device: str | torch.device = "auto",
    implementation: str = "reference",
    is_causal: bool = False,
    warmup_steps: int = 5,
    steps: int = 10,
) -> dict[str, Any]:
    """Time one pass of attention over random q, k, v of (batch_size, context_length, d_head).

    Args:
        pass_: "forward", which saves for backward as in training; "backward", alone; or "forward_backward".
        dtype: type of the tensors; "tf32" is float32 with TF32 matrix products.
        device: "auto", "cpu" or "cuda".
        implementation: a name in `cs336_systems.attention.IMPLEMENTATIONS`; "compiled", which is
            torch.compile of "reference"; or "flash_compiled", the Triton forward with PyTorch's compiled
            backward.
        warmup_steps, steps: as in `time_steps`.

    Returns:
        Value columns of a row. In MiB, beside the times:
        saved_for_backward_mib: distinct storages that autograd keeps, q, k and v among them;
        memory_before_backward_mib: q, k, v, the output and all that is saved, between forward and backward.
        Out of memory, and what the machine cannot do, are a status.

    Raises:
        ValueError: a name is unknown or a number out of range. RuntimeError: the device is not there.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_choice("pass", pass_, PASSES)
    check_choice("dtype", dtype, DTYPES)
    device = resolve_device(device)
    needed = accounting.attention_peak_bytes(batch_size, context_length, d_head, pass_, dtype, is_causal)
    if reason := _why_not(implementation, dtype, needed, device):
        return Timing(status="skipped", reason=reason).as_row()
    shape = (batch_size, context_length, d_head)
    with matmul_precision(dtype):
        values, reason = run_or_out_of_memory(
            lambda: _measure(shape, pass_, dtype, device, implementation, is_causal, warmup_steps, steps),
            device,
        )
    release_memory(device)
    return values or Timing(status="oom", reason=reason).as_row()


def attention_key(
    *,
    batch_size: int,
    context_length: int,
    d_head: int,
    pass_: str,
    dtype: str,
    implementation: str,
    is_causal: bool = False,
    warmup_steps: int = 5,
) -> dict[str, Any]:
    """The key columns of an attention row."""
    return {
        "implementation": implementation,
        "batch_size": batch_size,
        "context_length": context_length,
        "d_head": d_head,
        "is_causal": is_causal,
        "dtype": dtype,
        "pass": pass_,
        "warmup_steps": warmup_steps,
    }


def sweep_attention(
    *,
    context_lengths: Iterable[int],
    d_heads: Iterable[int],
    batch_size: int,
    passes: Iterable[str] = ("forward", "backward"),
    dtypes: Iterable[str] = ("float32",),
    implementations: Iterable[str] = ("reference",),
    is_causal: bool = False,
    device: str | torch.device = "auto",
    warmup_steps: int = 5,
    steps: int = 10,
) -> Iterator[list[dict[str, Any]]]:
    """Time every combination; yields the rows of one implementation, dtype, d_head and context at a time.

    Save each list as it comes, and a killed run keeps what it has:

        for rows in sweep_attention(...):
            save_rows(rows, slug)
    """
    passes, dtypes, d_heads, context_lengths = map(tuple, (passes, dtypes, d_heads, context_lengths))
    configurations = itertools.product(implementations, dtypes, d_heads, context_lengths)
    for implementation, dtype, d_head, context_length in configurations:
        run = {
            "batch_size": batch_size,
            "context_length": context_length,
            "d_head": d_head,
            "dtype": dtype,
            "implementation": implementation,
            "is_causal": is_causal,
            "warmup_steps": warmup_steps,
        }
        yield measured_in_order(
            lambda run=run: [
                attention_key(pass_=pass_, **run)
                | benchmark_attention(pass_=pass_, device=device, steps=steps, **run)
                for pass_ in passes
            ],
            as_row=dict,
        )


def saved_bytes(forward: Callable[[], Tensor], inputs: Iterable[Tensor]) -> tuple[int, int]:
    """Run a forward and count what stays until its backward.

    Args:
        forward: returns its output; it must record gradients.
        inputs: the tensors it reads.

    Returns:
        Bytes of the distinct storages that autograd saved; and bytes in use: inputs, output and saved tensors
        on a CPU, on a GPU what the allocator handed out during the forward, and the inputs.
    """
    inputs, saved = list(inputs), []

    def pack(tensor: Tensor) -> Tensor:
        # Detached: an operation that held its own output would never be freed.
        saved.append(tensor.detach())
        return saved[-1]

    device = inputs[0].device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    if device.type == "cuda":
        in_use = torch.cuda.memory_allocated(device) - before + _storage_bytes(inputs)
    else:
        in_use = _storage_bytes([*saved, output, *inputs])
    return _storage_bytes(saved), in_use


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _why_not(implementation: str, dtype: str, needed_bytes: int, device: torch.device) -> str:
    if dtype == "tf32" and (reason := why_no_tf32(device)):
        return reason
    if implementation in COMPILED and (reason := why_no_compile(device)):
        return reason
    if implementation in _TRITON and (reason := why_no_triton(device)):
        return reason
    # The closed form is that of reference attention; the others need far less.
    return why_no_memory(needed_bytes, device) if implementation in ("reference", "compiled") else ""


def _measure(
    shape: tuple[int, int, int],
    pass_: str,
    dtype: str,
    device: torch.device,
    implementation: str,
    is_causal: bool,
    warmup_steps: int,
    steps: int,
) -> dict[str, Any]:
    factory = {"device": device, "dtype": _TORCH_DTYPES.get(dtype, torch.float32)}
    inputs = [torch.randn(shape, **factory, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, **factory)

    function = _function(implementation)

    def forward() -> Tensor:
        clear_gradients()
        return function(*inputs, is_causal)

    def clear_gradients() -> None:
        for tensor in inputs:
            tensor.grad = None

    def backward(output: Tensor) -> None:
        output.backward(gradient)

    step, prepare = {
        "forward": (forward, None),
        "backward": (backward, forward),
        "forward_backward": (lambda: backward(forward()), None),
    }[pass_]
    timer = time_compiled if implementation in COMPILED else time_steps
    timing = timer(step, prepare=prepare, device=device, warmup_steps=warmup_steps, steps=steps)
    if timing.status != "ok":
        return timing.as_row()
    # After the timing, so that compiled code is there and the hooks do not change it.
    clear_gradients()
    saved, in_use = saved_bytes(forward, inputs)
    return timing.as_row() | {
        "saved_for_backward_mib": saved / MIB,
        "memory_before_backward_mib": in_use / MIB,
    }


def _function(implementation: str) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    """Called with q, k, v, is_causal."""
    if implementation == "flash_compiled":
        from cs336_systems.attention.flash_compiled import FlashAttentionCompiled

        return FlashAttentionCompiled.apply
    name = "reference" if implementation == "compiled" else implementation

    def run(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return attention(q, k, v, is_causal=is_causal, implementation=name)

    return torch.compile(run, dynamic=False) if implementation == "compiled" else run
