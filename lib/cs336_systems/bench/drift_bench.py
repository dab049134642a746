"""Data-parallel training beside one process on the whole batch: rows of training_drift."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from cs336_systems.arguments import check_choice
from cs336_systems.bench.ddp_bench import bucket_variants, check_run, wrap
from cs336_systems.configs import ModelConfig
from cs336_systems.configs import model_size as find_size
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.optimizer import AdamW
from cs336_systems.parallel import WorkerContext, choose_backend, stream
from cs336_systems.parallel.strategies import WRAPPERS

Row = dict[str, Any]

OPTIMIZERS = {"SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "AdamW": AdamW}


def training_drift(
    world_size: int,
    *,
    backend: str = "auto",
    implementations: Iterable[str] = ("naive",),
    optimizers: Iterable[str] = tuple(OPTIMIZERS),
    bucket_sizes_mb: Iterable[float] = (25,),
    model_size: str = "tiny",
    edition: int = 2025,
    context_length: int = 16,
    batch_size: int = 4,
    steps: int = 4,
) -> Iterator[list[Row]]:
    """Train under each wrapper, and beside it one process on the whole batch; yields the rows of each step.

    Every rank starts from its own random weights, as it would without care; the process alone starts from
    those of rank 0. After each step there are two rows, their `max_difference` the largest of any weight:
    compared "weights" with the process alone, compared "replicas" between the ranks.

    Args:
        batch_size: sequences in the global batch, of which each rank takes its equal share.

    Raises:
        ValueError: a name is unknown, or the batch cannot be shared equally.
    """
    config, implementations = find_size(model_size, edition), tuple(implementations)
    check_run(world_size, [batch_size], [], implementations, WRAPPERS)
    variants, optimizers = bucket_variants(implementations, tuple(bucket_sizes_mb)), tuple(optimizers)
    for optimizer in optimizers:
        check_choice("optimizer", optimizer, OPTIMIZERS)
    group = {"world_size": world_size, "backend": choose_backend(backend, world_size)}
    shape = {"batch_size": batch_size, "context_length": context_length, "dtype": "float32"}
    keys = [
        {"implementation": name, "attention": "plain", **config.columns(), **shape}
        | {**group, "bucket_size_mb": size, "optimizer": optimizer}
        for (name, size), optimizer in itertools.product(variants, optimizers)
    ]
    yield from stream(_compare, world_size, keys, steps, backend=group["backend"])


def _compare(context: WorkerContext, keys: list[Row], steps: int) -> None:
    """The worker: trains both models side by side on every rank."""
    for key in keys:
        config = find_size(key["model_size"], key["edition"])
        alone, mine = (_build(config, key, context, seed) for seed in (0, context.rank))
        wrapped = wrap(mine, key["implementation"], key["bucket_size_mb"])
        optimizers = [OPTIMIZERS[key["optimizer"]](model.parameters()) for model in (alone, wrapped)]
        share = key["batch_size"] // context.world_size
        shares = slice(None), slice(context.rank * share, (context.rank + 1) * share)
        for step in range(1, steps + 1):
            generator = torch.Generator().manual_seed(step - 1)  # the same batch on every rank
            shape = key["batch_size"], key["context_length"] + 1
            tokens = torch.randint(config.vocab_size, shape, generator=generator).to(context.device)
            for model, part, optimizer in zip((alone, wrapped), shares, optimizers, strict=True):
                optimizer.zero_grad()
                cross_entropy(model(tokens[part, :-1]), tokens[part, 1:]).backward()
                if model is wrapped:
                    wrapped.finish_gradient_synchronization()
                optimizer.step()
            weights = (parameters_to_vector(model.parameters()).detach() for model in (alone, wrapped.module))
            differences = _differences(*weights)
            rows = [{"compared": name, "max_difference": value} for name, value in differences.items()]
            context.send([{**key, "step_index": step, **row} for row in rows])


def _build(config: ModelConfig, key: Row, context: WorkerContext, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(config, key["context_length"], device=context.device)


def _differences(alone: Tensor, together: Tensor) -> dict[str, float]:
    """The largest, over all weights and ranks."""
    low, high = together.clone(), together.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    furthest = torch.maximum(high - alone, alone - low).max()
    return {"weights": furthest.item(), "replicas": (high - low).max().item()}
