"""Data-parallel training beside one process on the whole batch: how far their weights drift apart."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.bench.ddp_bench import WRAPPERS, bucket_variants
from cs336_systems.bench.model_bench import model_key
from cs336_systems.configs import ModelConfig
from cs336_systems.configs import model_size as find_size
from cs336_systems.functional import cross_entropy
from cs336_systems.measure.rows import save_rows
from cs336_systems.model import build_model
from cs336_systems.names import check_choice
from cs336_systems.optimizer import AdamW
from cs336_systems.parallel.worker import WorkerContext

OPTIMIZERS = {"SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "AdamW": AdamW}


def compare_training(
    context: WorkerContext,
    *,
    implementations: Iterable[str] = ("naive",),
    optimizers: Iterable[str] = tuple(OPTIMIZERS),
    bucket_sizes_mb: Iterable[float] = (25,),
    model_size: str = "tiny",
    edition: int = 2025,
    context_length: int = 16,
    batch_size: int = 4,
    steps: int = 4,
    slug: str | None = None,
    machine: str | None = None,
) -> list[dict[str, Any]]:
    """A worker for `launch`: train under each wrapper, and beside it one process on the whole batch.

    Every rank starts from its own random weights, as it would without care; the process alone starts from
    those of rank 0. After each step there are two rows, their `result` the largest absolute difference of
    any weight: tensor "weights" from the process alone, tensor "replicas" between the ranks.

    Args:
        batch_size: sequences in the global batch, of which each rank takes its equal share.
        slug, machine: save the rows as this machine's.

    Raises:
        ValueError: a name is unknown, or the batch cannot be shared equally.
    """
    config = find_size(model_size, edition)
    if batch_size % context.world_size:
        raise ValueError(f"batch_size {batch_size} cannot be shared by {context.world_size} ranks equally")
    variants = bucket_variants(implementations, tuple(bucket_sizes_mb))
    rows = []
    for (name, size), optimizer in itertools.product(variants, tuple(optimizers)):
        check_choice("implementation", name, WRAPPERS)
        check_choice("optimizer", optimizer, OPTIMIZERS)
        key = model_key(config, context_length, batch_size, "train_step", "float32", name, warmup_steps=0)
        key |= {"world_size": context.world_size, "backend": context.backend}
        key |= {"bucket_size_mb": size, "case": optimizer}
        for step, drift in enumerate(_train_both(context, config, key, steps), start=1):
            rows += [key | {"step": step, "tensor": tensor, "result": drift[tensor]} for tensor in drift]
    if slug and machine and context.rank == 0:
        save_rows(rows, slug, machine=machine)
    return rows


def _train_both(
    context: WorkerContext, config: ModelConfig, key: dict[str, Any], steps: int
) -> Iterator[dict[str, float]]:
    """After every step, the differences by the name of their row."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build_model(config, key["context_length"], device=context.device)

    buckets = {} if key["bucket_size_mb"] is None else {"bucket_size_mb": key["bucket_size_mb"]}
    alone, wrapped = build(seed=0), WRAPPERS[key["implementation"]](build(seed=context.rank), **buckets)
    optimizers = [OPTIMIZERS[key["case"]](model.parameters()) for model in (alone, wrapped)]
    share = key["batch_size"] // context.world_size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    for step in range(steps):
        tokens = _tokens(config, key, step).to(context.device)
        for model, part, optimizer in zip((alone, wrapped), (slice(None), mine), optimizers, strict=True):
            optimizer.zero_grad()
            cross_entropy(model(tokens[part, :-1]), tokens[part, 1:]).backward()
            if model is wrapped:
                wrapped.finish_gradient_synchronization()
            optimizer.step()
        yield _drift(_flat(alone), _flat(wrapped.module))


def _tokens(config: ModelConfig, key: dict[str, Any], step: int) -> Tensor:
    """The whole batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    shape = (key["batch_size"], key["context_length"] + 1)
    return torch.randint(config.vocab_size, shape, generator=generator)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _drift(alone: Tensor, together: Tensor) -> dict[str, float]:
    """Largest differences, over all ranks."""
    low, high = together.clone(), together.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    furthest = torch.maximum(high - alone, alone - low).max()
    return {"weights": furthest.item(), "replicas": (high - low).max().item()}
