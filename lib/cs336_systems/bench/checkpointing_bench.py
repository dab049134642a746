"""Time and peak memory of forward and backward under each checkpointing strategy."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems import accounting
from cs336_systems.accounting.checkpoint_costs import Plan, block_count, peak, recomputed
from cs336_systems.arguments import check_choice
from cs336_systems.attention.implementations import MODEL_ATTENTION
from cs336_systems.bench.attention_bench import why_no_attention
from cs336_systems.bench.memory_bench import one_block
from cs336_systems.bench.model_bench import model_key
from cs336_systems.configs import ModelConfig
from cs336_systems.measure.allocations import MIB, stage_peaks
from cs336_systems.measure.memory_recording import record_memory
from cs336_systems.measure.saved_tensors import saved_for_backward
from cs336_systems.model import build_model
from cs336_systems.training.checkpointing import KeepsMatmuls, forward_with, strategy
from cs336_systems.training.steps import ModelSteps, autocast
from labbook.machine import why_no_memory
from labbook.timing import matmul_precision, release_memory, resolve_device, time_steps


def block_bytes(
    config: ModelConfig,
    *,
    context_length: int,
    batch_size: int,
    dtype: str = "float32",
    attention_implementation: str = "plain",
    device: str | torch.device = "auto",
) -> tuple[int, int]:
    """What one block saves besides its input, and its input: `inside` and `boundary` of `peak`."""
    device = resolve_device(device)
    x = torch.randn(batch_size, context_length, config.d_model, device=device, requires_grad=True)
    with autocast(device, dtype):
        saved = saved_for_backward(one_block(config, context_length, device, attention_implementation), x)
    boundary = int(saved[saved.is_input].size_bytes.sum())
    return int(saved.size_bytes.sum()) - boundary, boundary


def sweep_checkpointing(
    config: ModelConfig,
    strategies: Iterable[str],
    *,
    context_length: int,
    batch_size: int,
    dtype: str = "float32",
    attention_implementation: str = "plain",
    device: str | torch.device = "auto",
    warmup_steps: int = 1,
    steps: int = 3,
) -> Iterator[list[dict[str, Any]]]:
    """Yield a row of the table "checkpointing_times" for each strategy; what cannot run is a status.

    Beside what is measured stands what `accounting.checkpoint_costs` says: `recomputed_blocks`, the block
    forwards that backward runs again, and, of plans in whole blocks, `saved_for_backward_mib` at the peak.

    Args:
        strategies: names that `training.strategy` knows.
        attention_implementation: one of MODEL_ATTENTION.
    """
    check_choice("attention implementation", attention_implementation, MODEL_ATTENTION)
    device, attention = resolve_device(device), {"attention_implementation": attention_implementation}
    shape = {"context_length": context_length, "batch_size": batch_size, "dtype": dtype}
    key = model_key(config, pass_="forward_backward", warmup_steps=warmup_steps, **shape, **attention)
    # What no strategy saves: weights, gradients and, of one token, activations.
    least = accounting.peak_bytes(config, batch_size, 1, "forward_backward", dtype)
    if reason := why_no_attention(attention_implementation, dtype, device) or why_no_memory(least, device):
        yield [key | {"strategy": name, "status": "skipped", "reason": reason} for name in strategies]
        return
    sizes = block_bytes(config, **shape, **attention, device=device)
    model = build_model(config, context_length, **attention, device=device)
    how = {"device": device, "warmup_steps": warmup_steps, "steps": steps}
    for name in strategies:
        plan = strategy(name)

        def forward(model: nn.Module, tokens: Tensor, plan=plan) -> Tensor:
            return forward_with(model, plan, tokens)

        checkpointed = ModelSteps(model, batch_size, context_length, dtype, call=forward)
        with matmul_precision(dtype):
            timing = time_steps(checkpointed.forward_backward, **how)
        row = key | {"strategy": name} | timing.as_row()
        row |= _modelled(plan(range(config.num_layers)), config.num_layers, *sizes)
        if timing.status == "ok":
            row |= _peaks(checkpointed)
        yield [row]
        model.zero_grad(set_to_none=True)
        release_memory(device)


def _modelled(plan: Plan, num_layers: int, inside: int, boundary: int) -> dict[str, float]:
    parts = block_count(plan)  # more than layers where a block is two
    modelled = {"recomputed_blocks": recomputed(plan) * num_layers // parts}
    if parts == num_layers and not any(isinstance(part, KeepsMatmuls) for part in plan):
        modelled["saved_for_backward_mib"] = peak(plan, inside, boundary) / MIB
    return modelled


def _peaks(steps: ModelSteps) -> dict[str, float]:
    """What was asked of the allocator at most in the steps just timed (MiB); `Timing` has its blocks.

    A CPU keeps no count and rounds nothing: there one more step is recorded, and its memory events added up.
    """
    if steps.device.type == "cuda":
        requested = torch.cuda.memory_stats(steps.device)["requested_bytes.all.peak"]
        return {"requested_memory_mib": requested / MIB}
    with TemporaryDirectory() as folder:
        history = record_memory(steps, "forward_backward", Path(folder) / "step")
    return dict.fromkeys(("peak_memory_mib", "requested_memory_mib"), stage_peaks(history).total.max())
