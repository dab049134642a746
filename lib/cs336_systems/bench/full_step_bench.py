"""A full training step of one model, sharded over all ranks, with each implementation in turn: rows of each.

The leaderboard's step: forward, loss, backward and AdamW, parameters and its state in float32, and matmuls in
the dtype that is asked for.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import get_total_norm

from cs336_systems.attention.implementations import ATTENTION, sdpa_backend
from cs336_systems.bench.attention_bench import why_no_attention
from cs336_systems.bench.ddp_bench import check_run
from cs336_systems.bench.model_bench import OF_ANY_TIMING, model_key
from cs336_systems.bench.overlap_bench import profile_steps, timeline_rows
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import torch_dtype
from cs336_systems.measure.overlap import step_lanes
from cs336_systems.model import build_model
from cs336_systems.nvtx import annotate
from cs336_systems.parallel import WorkerContext, choose_backend, stream
from cs336_systems.parallel.strategies import SHARDINGS
from cs336_systems.training.full_steps import FULL_STEPS, FullStep
from cs336_systems.training.selective import Item, choose
from labbook.machine import why_no_compile
from labbook.profiles.table import one_step, stages
from labbook.ranks import (
    measure_on_all,
    peaks,
    reset_peaks,
    slowest,
    time_together,
)
from labbook.timing import MIB, release_memory, time_steps

Row = dict[str, Any]

MEMORY_MARGIN = 0.06  # of the GPU's memory that no tensor is planned to fill: CUDA, NCCL, the profiler
LOSS_STEPS = 3
SMALLEST_SHARE = 1e-5  # of a profiled step's kernels: those that take less in all of it have no row


def benchmark_full_step(
    world_size: int,
    config: ModelConfig,
    *,
    backend: str = "auto",
    num_layers: int = 0,
    context_length: int = 128,
    batch_size: int = 2,
    dtype: str = "bfloat16",
    implementations: Iterable[str] = tuple(FULL_STEPS),
    warmup_steps: int = 1,
    steps: int = 5,
    profile: bool = False,
) -> Iterator[tuple[str, list[Row]]]:
    """Train with each of FULL_STEPS in turn, all in one launch and from the same weights.

    Yields pairs of a table's name and its rows, as they come; all of one implementation:

    - "full_step_losses": loss and norm of the gradients, means over the ranks, of the first steps.
    - "full_step_kept", where memory is chosen: what blocks keep, and what its recomputation takes.
    - "full_step_times": of every step the slowest rank counts; the peak is that of the fullest.
    - "full_step_kernels" and "full_step_timeline", of one more step, where profile is set: the kernels of
      rank 0, and when it computed and communicated.

    Memory that ran out is a status, and what was to follow is skipped.

    Args:
        num_layers: blocks; 0 are all that the model has.
        batch_size: sequences in the global batch, shared equally by the ranks.
        dtype: what weights are cast to before they are gathered, and gradients before they are reduced.

    Raises:
        ValueError: a name is unknown, or a batch cannot be shared equally.
    """
    implementations = tuple(implementations)
    config = replace(config, num_layers=num_layers or config.num_layers)
    check_run(world_size, [batch_size], [dtype], implementations, FULL_STEPS)
    group = {"world_size": world_size, "backend": choose_backend(backend, world_size)}
    step = (context_length, batch_size, "train_step", dtype)
    keys = [
        model_key(config, *step, name, warmup_steps, FULL_STEPS[name].attention)
        | {"num_layers": config.num_layers}
        | group
        for name in implementations
    ]
    how = {"backend": group["backend"], "timeout_s": 3600.0}
    yield from stream(_measure_all, world_size, config, keys, steps, profile, **how)


class ShardedModel:
    """A model on one rank's share of a batch of random tokens, built and sharded as a row's key says."""

    def __init__(self, config: ModelConfig, key: Row, context: WorkerContext):
        self.parts = parts = FULL_STEPS[key["implementation"]]
        sharding = SHARDINGS[parts.sharding]
        self.config, self.length = config, key["context_length"]
        self.share = key["batch_size"] // context.world_size
        torch.manual_seed(0)  # the same weights, and the same tokens, whatever is compared
        backend = ATTENTION[parts.attention].sdpa_backend
        options = {"attention_implementation": "sdpa" if backend else parts.attention}
        model = build_model(config, self.length, device=context.device, **options)
        parts.prepare(model)
        checkpointed = math.ceil(parts.checkpoints * config.num_layers)
        model.layers = nn.ModuleList(
            _wrapped(block, parts, n < checkpointed) for n, block in enumerate(model.layers)
        )
        compute_dtype = torch_dtype(key["dtype"]) if torch_dtype(key["dtype"]).itemsize < 4 else None
        self.model = sharding.wrap(model, compute_dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (2, key["batch_size"], self.length)
        batch = torch.randint(config.vocab_size, shape, device=context.device)
        self.tokens, self.targets = batch[:, context.rank * self.share :][:, : self.share]

    def forward_backward(self) -> torch.Tensor:
        """Gradients of this step alone, on their ranks; returns this rank's loss."""
        self.model.zero_grad(set_to_none=True)
        with annotate("forward"):
            loss = self.model(self.tokens, self.targets)
        with annotate("backward"):
            loss.backward()
        with annotate("communication"):
            self.model.finish_gradient_synchronization()
        return loss.detach()

    def train_step(self) -> None:
        """Forward, backward and AdamW."""
        self.forward_backward()
        with annotate("optimizer"):
            self.optimizer.step()

    def gradient_norm(self) -> torch.Tensor:
        """Of the whole gradient."""
        if hasattr(self.model, "clip_grad_norm_"):
            return self.model.clip_grad_norm_(float("inf"))
        norm = get_total_norm([p.grad for p in self.model.parameters()])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _wrapped(block: nn.Module, parts: FullStep, checkpoints: bool) -> nn.Module:
    compiled = partial(torch.compile, dynamic=False) if parts.compiles else lambda module: module
    if not checkpoints:
        return compiled(block)
    if parts.sharding == "fsdp2":
        return compiled(checkpoint_wrapper(block))
    return checkpoint_wrapper(compiled(block))  # our FSDP's hooks are the block's, inside of the checkpoint


def _measure_all(
    context: WorkerContext, config: ModelConfig, keys: list[Row], steps: int, profile: bool
) -> None:
    """The worker: the rows of times come out the same on every rank."""
    if context.device.type == "cuda":  # fewer gaps between tensors: selective recomputation fills the memory
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    reason = ""
    for key in keys:
        missing = _why_not(FULL_STEPS[key["implementation"]], key["dtype"], context.device)
        values: Row = {"status": "skipped", "reason": missing}
        if not missing:
            measure = partial(_measure, context, config, key, steps, profile)
            with sdpa_backend(key["attention"]):
                values, reason = measure_on_all(measure, context, key["dtype"], reason)
        context.send(("full_step_times", [key | values]))


def _why_not(parts: FullStep, dtype: str, device: torch.device) -> str:
    if parts.attention == "sdpa_cudnn" and device.type != "cuda":
        return "cuDNN's attention needs a GPU"
    return why_no_attention(parts.attention, dtype, device) or (
        why_no_compile(device) if parts.compiles else ""
    )


def _measure(context: WorkerContext, config: ModelConfig, key: Row, steps: int, profile: bool) -> Row:
    run = ShardedModel(config, key, context)
    of_step = key | OF_ANY_TIMING
    context.send(("full_step_losses", _losses(run, of_step)))
    if run.parts.selects:
        context.send(("full_step_kept", _choose_memory(context, run, of_step)))
    reset_peaks(context)
    timing = time_together(run.train_step, context, warmup_steps=key["warmup_steps"], steps=steps)
    memory = peaks(context)
    if profile:
        _profile(context, run, of_step)
    return timing.as_row() | memory


def _profile(context: WorkerContext, run: ShardedModel, key: Row) -> None:
    """Send the kernels of one more step, and when this rank computed and communicated in it."""
    profiled = profile_steps(run.train_step, context)
    _, kernels = one_step(profiled)
    kernels["range"] = stages(kernels)
    kernels["total_ms"] = kernels["end_ms"] - kernels["start_ms"]
    summed = kernels.groupby(["range", "kernel", "class"])["total_ms"].agg(calls="size", total_ms="sum")
    long = summed["total_ms"] > SMALLEST_SHARE * summed["total_ms"].sum()
    rows = summed[long].round(3).reset_index().to_dict("records")
    context.send(("full_step_kernels", [key | row for row in rows]))
    context.send(("full_step_timeline", timeline_rows(step_lanes(profiled), key)))


def _losses(run: ShardedModel, key: Row) -> list[Row]:
    rows = []
    for step_index in range(1, LOSS_STEPS + 1):
        loss = run.forward_backward()
        dist.all_reduce(loss)
        values = {"loss": loss.item() / dist.get_world_size(), "gradient_norm": run.gradient_norm().item()}
        rows.append(key | {"step_index": step_index} | values)
        run.optimizer.step()
    return rows


def _choose_memory(context: WorkerContext, run: ShardedModel, key: Row) -> list[Row]:
    """Let blocks keep what saves the most recomputation in the memory that the peak without it leaves."""
    from cs336_systems.training.fused_block import KEEPABLE, kept_bytes

    tokens, layers = run.share * run.length, run.model.module.layers
    sizes = kept_bytes(run.config, tokens, torch_dtype(key["dtype"]).itemsize)
    times = dict(zip(KEEPABLE, slowest(_recompute_ms(run, key["dtype"], KEEPABLE), context), strict=True))
    everything = len(layers) * sum(math.ceil(sizes[name] / MIB) for name in KEEPABLE)
    budget = everything // 2 * MIB  # on a CPU
    if context.device.type == "cuda":
        release_memory(context.device)
        reset_peaks(context)
        run.train_step()  # as it is timed, which takes more than the first steps do
        total = torch.cuda.get_device_properties(context.device).total_memory
        budget = max(0, int(total * (1 - MEMORY_MARGIN) - peaks(context)["peak_memory_mib"] * MIB))
    items = [Item(f"{n} {name}", sizes[name], times[name]) for n in range(len(layers)) for name in KEEPABLE]
    chosen = {item.name for item in choose(items, budget)}
    for n, layer in enumerate(layers):
        layer.keep = frozenset(name for name in KEEPABLE if f"{n} {name}" in chosen)
    counts = {name: sum(name in layer.keep for layer in layers) for name in KEEPABLE}
    return [
        key
        | {"tensor": name, "count": counts[name], "size_mib": sizes[name] / MIB, "recompute_ms": times[name]}
        for name in KEEPABLE
    ]


def _recompute_ms(run: ShardedModel, dtype: str, keepable: Iterable[str]) -> list[float]:
    """Median time of what backward repeats for each, on random numbers of the shape."""
    from cs336_systems.training.fused_block import recomputation

    device, type_ = run.tokens.device, torch_dtype(dtype)
    small = replace(run.config, num_layers=1, vocab_size=1)
    block = build_model(small, run.length, device=device, dtype=type_).layers[0]
    x = torch.randn(run.share, run.length, run.config.d_model, device=device, dtype=type_)
    with torch.no_grad():
        again = recomputation(block, x)
        return [time_steps(again[name], device=device, warmup_steps=1, steps=3).p50_ms for name in keepable]
