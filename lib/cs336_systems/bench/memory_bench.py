"""Memory as rows: one step of a model, and what one of its blocks keeps for backward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from cs336_systems import accounting
from cs336_systems.bench.model_bench import model_key
from cs336_systems.configs import ModelConfig, model_size
from cs336_systems.measure.allocations import (
    CATEGORIES,
    MIB,
    MemoryHistory,
    largest_allocations,
    stage_peaks,
    timeline,
    timeline_rows,
)
from cs336_systems.measure.host import why_no_memory
from cs336_systems.measure.memory_recording import record_memory
from cs336_systems.measure.model_steps import ModelSteps, autocast
from cs336_systems.measure.saved_tensors import contributors, gradient_bytes, saved_for_backward
from cs336_systems.measure.timing import (
    matmul_precision,
    release_memory,
    resolve_device,
    run_or_out_of_memory,
)
from cs336_systems.model import TransformerBlock, build_model

Rows = list[dict[str, Any]]

# What tells one recording from another, and what its peak is explained by.
RUN = ("edition", "model_size", "batch_size", "context_length", "dtype", "pass")
PARTS = ("closed_form_mib", "other_mib", "rounding_mib", "rest_mib")

# A timeline for a plot, thin enough to be kept as rows.
TIMELINE_POINTS = 110


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

    Returns:
        Rows by table: "peaks", the MiB of each category at the peak of each stage, under the whole step's
        `peak_memory_mib` and, in what was asked of the allocator, `requested_memory_mib`; "timeline";
        "largest", the ten largest allocations, numbered by `step`. Save them with `replacing` the key columns
        of `measure.training.model_key`.
    """
    device = resolve_device(device)
    key = model_key(config, context_length, batch_size, pass_, dtype, warmup_steps=1)
    status, recorded = "skipped", None
    reason = why_no_memory(accounting.peak_bytes(config, batch_size, context_length, pass_, dtype), device)
    if not reason:
        with matmul_precision(dtype):
            recorded, reason = run_or_out_of_memory(
                lambda: _second_step(config, context_length, batch_size, pass_, dtype, device, stem), device
            )
        status = "oom"
        release_memory(device)
    if recorded is None:
        return {"peaks": [key | {"status": status, "reason": reason}]}
    history, peak_mib = recorded
    return {
        "peaks": _peak_rows(history, peak_mib, key),
        "timeline": timeline_rows(timeline(history, points=TIMELINE_POINTS), key),
        "largest": _largest_rows(history, key),
    }


def explained_peaks(peaks: pd.DataFrame) -> pd.DataFrame:
    """One line a recording: the stage of its peak, and the closed form beside what it leaves out.

    Args:
        peaks: the table "peaks" of `memory_rows`.

    Returns:
        RUN, status and, of what ran, `range` (stage of the peak), peak_memory_mib, and the parts that it is
        the sum of: closed_form_mib (`accounting.peak_bytes`), other_mib (no tensor of the step: workspaces of
        libraries, the batch), rounding_mib (the allocator's, of sizes), rest_mib (explained by none of them).
    """
    lines = []
    for key, rows in peaks.groupby(list(RUN), sort=False):
        line = dict(zip(RUN, key, strict=True)) | {"status": rows["status"].iloc[0]}
        lines.append(line | _explained(line, rows) if line["status"] == "ok" else line)
    return pd.DataFrame(lines, columns=[*RUN, "status", "range", "peak_memory_mib", *PARTS])


def _explained(run: dict[str, Any], rows: pd.DataFrame) -> dict[str, Any]:
    stage = rows.groupby("range")["size_mib"].sum().idxmax()
    at_peak = rows[rows["range"] == stage].set_index("category")["size_mib"]
    config = model_size(run["model_size"], int(run["edition"]))
    shape = int(run["batch_size"]), int(run["context_length"])
    closed_form = accounting.peak_bytes(config, *shape, run["pass"], run["dtype"]) / MIB
    peak, requested = (rows[f"{name}_memory_mib"].iloc[0] for name in ("peak", "requested"))
    other = at_peak.get("other", 0.0)
    parts = (closed_form, other, peak - requested, requested - other - closed_form)
    return {"range": stage, "peak_memory_mib": peak} | dict(zip(PARTS, parts, strict=True))


def block_rows(
    config: ModelConfig,
    *,
    context_length: int,
    batch_size: int,
    dtype: str = "float32",
    device: str | torch.device = "auto",
) -> Rows:
    """What one TransformerBlock saves for backward by line and operation, and the gradients that it gets.

    Saved tensors have `range` (module in the block), `tensor` (operation) and `code`; gradients have `case`
    "gradient" and the parameter's name as `tensor`.
    """
    device = resolve_device(device)
    key = model_key(config, context_length, batch_size, "forward_backward", dtype, warmup_steps=0)
    block = one_block(config, context_length, device)
    x = torch.randn(batch_size, context_length, config.d_model, device=device, requires_grad=True)
    with autocast(device, dtype):
        saved = contributors(saved_for_backward(block, x))
        output = block(x)
    output.sum().backward()
    rows = [
        key
        | {"case": "saved", "range": row.module, "tensor": row.operation, "code": row.code}
        | {"calls": row.tensors, "size_mib": row.size_bytes / MIB}
        for row in saved.itertuples()
    ]
    rows += [
        key | {"case": "gradient", "tensor": row.name, "size_mib": row.size_bytes / MIB}
        for row in gradient_bytes(block).itertuples(index=False)
    ]
    del block, x, output
    release_memory(device)
    return rows


def one_block(config: ModelConfig, context_length: int, device: torch.device) -> TransformerBlock:
    """A block as the model has it, without the rest of the model."""
    return build_model(replace(config, num_layers=1), context_length, device=device).layers[0]


def _second_step(
    config: ModelConfig,
    context_length: int,
    batch_size: int,
    pass_: str,
    dtype: str,
    device: torch.device,
    stem: Path,
) -> tuple[MemoryHistory, float | None]:
    """The history of the second step, and its peak by the CUDA allocator's own count (MiB).

    The first step makes the optimizer's state and the libraries' workspaces; the second is like others.
    """
    steps = ModelSteps(build_model(config, context_length, device=device), batch_size, context_length, dtype)
    step, prepare = steps.of(pass_)
    step() if prepare is None else step(prepare())
    if device.type != "cuda":
        return record_memory(steps, pass_, stem), None
    torch.cuda.reset_peak_memory_stats(device)
    history = record_memory(steps, pass_, stem)
    return history, torch.cuda.max_memory_allocated(device) / MIB


def _peak_rows(history: MemoryHistory, peak_mib: float | None, key: dict[str, Any]) -> Rows:
    peaks = stage_peaks(history)
    requested_mib = peaks.total.max()
    whole = {"peak_memory_mib": peak_mib or requested_mib, "requested_memory_mib": requested_mib}
    return [
        key
        | {"range": row["stage"], "category": category, "size_mib": row[category], "at_ms": row["at_ms"]}
        | whole
        for row in peaks.to_dict("records")
        for category in CATEGORIES
    ]


def _largest_rows(history: MemoryHistory, key: dict[str, Any]) -> Rows:
    largest = largest_allocations(history).rename(columns={"times": "calls"})
    return [key | {"step": number, **row} for number, row in enumerate(largest.to_dict("records"))]
