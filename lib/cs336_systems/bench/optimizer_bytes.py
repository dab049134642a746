"""What a rank keeps and sends when its optimizer is sharded, with each of several: on a small model."""

from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle  # takes classes of a notebook by value
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from cs336_systems.configs import model_size as find_size
from cs336_systems.measure.sent_bytes import ring_collectives
from cs336_systems.model import build_model
from cs336_systems.parallel import WorkerContext, launch

# Makes a wrapper of the module, with finish_gradient_synchronization(), and the optimizer of its parameters.
Wrap = Callable[[nn.Module], tuple[nn.Module, Optimizer]]
MB = 2**20


def count_optimizer_bytes(
    implementations: Mapping[str, Wrap],
    world_size: int,
    *,
    model_size: str = "tiny",
    edition: int = 2025,
    context_length: int = 32,
    steps: int = 3,
    timeout_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Train the same model with each over Gloo, on two sequences a rank; count what the last step sends.

    In the last step collectives are carried out as rings, whose every send is counted.

    Args:
        implementations: by name, one after the other; they may be defined in a notebook.
        steps: 2 or more.

    Returns:
        One dictionary for each implementation, rank and collective, with these three, calls, sent_mb (2**20
        bytes; calls of less than a kilobyte, such as flags, are left out), and equal for all of a rank:
        state_mb (of the optimizer, as far as it has `.state` or `.inside.state`) and max_difference of a
        weight to that of the first implementation, after the steps before the last.

    Raises:
        ValueError: steps is below 2.
    """
    if steps < 2:
        raise ValueError(f"steps is {steps}; allowed: 2 or more")
    arguments = (cloudpickle.dumps(dict(implementations)), model_size, edition, context_length, steps)
    by_rank = launch(_count, world_size, *arguments, backend="gloo", timeout_s=timeout_s)
    return [row for rows in by_rank for row in rows]


def _count(
    context: WorkerContext, made: bytes, model_size: str, edition: int, context_length: int, steps: int
) -> list[dict[str, Any]]:
    wraps: dict[str, Wrap] = cloudpickle.loads(made)
    config, rows, first = find_size(model_size, edition), [], None
    for name, make in wraps.items():
        torch.manual_seed(0)
        module = build_model(config, context_length)
        wrapped, optimizer = make(module)

        def step(number: int, wrapped: nn.Module = wrapped, optimizer: Optimizer = optimizer) -> None:
            generator = torch.Generator().manual_seed(number * context.world_size + context.rank)
            tokens = torch.randint(config.vocab_size, (2, context_length + 1), generator=generator)
            optimizer.zero_grad()
            logits = wrapped(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            wrapped.finish_gradient_synchronization()
            optimizer.step()

        for number in range(steps - 1):
            step(number)
        weights = [parameter.detach().clone() for parameter in module.parameters()]
        first = first or weights
        with ring_collectives() as sent:
            step(steps - 1)
        large = [each for each in sent if each.bytes >= 1000]
        values = {"implementation": name, "rank": context.rank, "state_mb": _state_bytes(optimizer) / MB}
        values["max_difference"] = max(
            (one - other).abs().max().item() for one, other in zip(weights, first, strict=True)
        )
        for collective in dict.fromkeys(each.collective for each in large):
            sizes = [each.bytes for each in large if each.collective == collective]
            rows.append(values | {"collective": collective, "calls": len(sizes), "sent_mb": sum(sizes) / MB})
        dist.barrier()
    return rows


def _state_bytes(optimizer: Optimizer) -> int:
    states = getattr(optimizer, "inside", optimizer).state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))
