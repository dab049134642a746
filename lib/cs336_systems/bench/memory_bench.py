"""Memory as rows: one step of a model, and what one of its blocks keeps for backward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cs336_systems import accounting
from cs336_systems.bench.model_bench import model_key
from cs336_systems.configs import ModelConfig
from cs336_systems.measure import allocations
from cs336_systems.measure.allocations import MIB, MemoryHistory
from cs336_systems.measure.memory_recording import record_memory
from cs336_systems.measure.saved_tensors import saved_for_backward
from cs336_systems.model import TransformerBlock, build_model
from cs336_systems.training.steps import ModelSteps, autocast
from labbook import timing
from labbook.machine import why_no_memory

Rows = list[dict[str, Any]]


def memory_rows(
    config: ModelConfig,
    *,
    context_length: int,
    batch_size: int,
    pass_: str,
    dtype: str = "float32",
    device: str | torch.device = "auto",
    stem: Path,
) -> dict[str, Rows]:
    """Record the second step of a fresh model; what cannot run is a status.

    Args:
        stem: where `record_memory` leaves the recording.

    Returns:
        Rows by table: "memory_peaks", the MiB of each category at the peak of each stage, beside the whole
        step's peak in the allocator's blocks and in what was asked of it; "memory_timeline"; and
        "largest_allocations", ten of them. Of a step that did not run, one row of "memory_peaks".
    """
    device = timing.resolve_device(device)
    key = model_key(config, context_length, batch_size, pass_, dtype)
    needed = accounting.peak_bytes(config, batch_size, context_length, pass_, dtype)
    if reason := why_no_memory(needed, device):
        return {"memory_peaks": [key | {"status": "skipped", "reason": reason}]}

    def record() -> tuple[MemoryHistory, float | None]:
        """The history of the second step, and its peak by the CUDA allocator's own count (MiB)."""
        model = build_model(config, context_length, device=device)
        steps = ModelSteps(model, batch_size, context_length, dtype)
        step, prepare = steps.of(pass_)  # the first makes the optimizer's state and libraries' workspaces
        step() if prepare is None else step(prepare())
        if device.type != "cuda":
            return record_memory(steps, pass_, stem), None
        torch.cuda.reset_peak_memory_stats(device)
        return record_memory(steps, pass_, stem), torch.cuda.max_memory_allocated(device) / MIB

    with timing.matmul_precision(dtype):
        recorded, reason = timing.run_or_out_of_memory(record, device)
    timing.release_memory(device)
    if recorded is None:
        return {"memory_peaks": [key | {"status": "oom", "reason": reason}]}
    history, peak_mib = recorded
    largest = allocations.largest_allocations(history).rename_axis("rank_by_size").reset_index()
    tables = {
        "memory_peaks": _peak_rows(history, peak_mib),
        "memory_timeline": allocations.timeline_rows(allocations.timeline(history)),
        "largest_allocations": largest.to_dict("records"),
    }
    return {table: [key | row for row in rows] for table, rows in tables.items()}


def block_rows(
    config: ModelConfig,
    *,
    context_length: int,
    batch_size: int,
    dtype: str = "float32",
    device: str | torch.device = "auto",
) -> Rows:
    """What one TransformerBlock saves for backward, and its gradients, as rows of the table "block_tensors".

    The `tensor` of what is "saved" is the operation that saved it, of a "gradient" its parameter's name.
    """
    device = timing.resolve_device(device)
    key = model_key(config, context_length, batch_size, dtype=dtype)
    block = one_block(config, context_length, device)
    x = torch.randn(batch_size, context_length, config.d_model, device=device, requires_grad=True)
    with autocast(device, dtype):
        saved = saved_for_backward(block, x)
        output = block(x)
    output.sum().backward()
    saved = saved.assign(kind="saved", tensor=saved.operation, size_mib=saved.size_bytes / MIB)
    saved = saved.groupby(["kind", "module", "tensor", "code"], sort=False)["size_mib"]
    saved = saved.agg(count="size", size_mib="sum").reset_index()
    rows = saved.sort_values("size_mib", ascending=False).to_dict("records")
    rows += [
        {"kind": "gradient", "tensor": name, "size_mib": parameter.grad.nbytes / MIB}
        for name, parameter in block.named_parameters()
    ]
    del block, x, output
    timing.release_memory(device)
    return [key | row for row in rows]


def one_block(
    config: ModelConfig, context_length: int, device: torch.device, attention_implementation: str = "plain"
) -> TransformerBlock:
    """A block as the model has it, without the rest of the model."""
    how = {"device": device, "attention_implementation": attention_implementation}
    return build_model(replace(config, num_layers=1), context_length, **how).layers[0]


def _peak_rows(history: MemoryHistory, peak_mib: float | None) -> Rows:
    peaks = allocations.stage_peaks(history)
    requested_mib = peaks.pop("total").max()
    peaks = peaks.assign(peak_memory_mib=peak_mib or requested_mib, requested_memory_mib=requested_mib)
    known = ["stage", "at_ms", "peak_memory_mib", "requested_memory_mib"]
    return peaks.melt(known, allocations.CATEGORIES, "category", "size_mib").to_dict("records")
