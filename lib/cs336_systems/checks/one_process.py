"""Training on several ranks against one process with the whole batch: what checks of DDP and FSDP share."""

import contextlib
from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from cs336_systems.checks.on_ranks import close, unlike
from cs336_systems.parallel import WorkerContext

STEPS = 4
# The losses that a rank runs backward from in one step, of a model.
Losses = Callable[[nn.Module, int, int], Iterable[Tensor]]


def gradient_mistake(
    name: str, found: Tensor, own: Tensor, total: Tensor, ranks: int, otherwise: str = ""
) -> str | None:
    """What a gradient is, if it is not the mean over the ranks.

    Args:
        own, total: this rank's gradient, and the sum over the ranks.
        otherwise: a hint if it is none of the usual.
    """
    gradient = f"the gradient of {name!r} is"
    suspects = {
        f"{gradient} the sum over the ranks. Divide it by the world size.": total,
        f"{gradient} averaged twice. Divide it by the world size once.": total / ranks**2,
        f"{gradient} still this rank's own. Average it over the ranks, in place.": own,
    }
    return unlike(found, total / ranks, suspects, f"{gradient} not the mean over the ranks.{otherwise}")


def follow_one_process(
    context: WorkerContext,
    alone: nn.Module,
    wrapped: nn.Module,
    losses: Losses,
    make_optimizer: Callable[..., Optimizer],
    weights: Callable[[nn.Module], dict[str, Tensor]],
    how: str,
    silent: int = 0,
) -> str | None:
    """Train both: the first weight in which they differ.

    Args:
        losses: called as losses(model, rank, step); every process can compute those of every rank.
        weights: of the wrapped module, whole and by name.
        how: of the message, after the optimizer's name.
        silent: so many backward passes of a step are run under no_sync().
    """
    if silent and not hasattr(wrapped, "no_sync"):
        return "it has no no_sync() context, under which backward passes only accumulate."
    optimizers = make_optimizer(alone.parameters()), make_optimizer(wrapped.parameters())
    difference = None
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(context.world_size):
            for loss in losses(alone, rank, step):
                (loss / context.world_size).backward()
        for number, loss in enumerate(losses(wrapped, context.rank, step)):
            with wrapped.no_sync() if number < silent else contextlib.nullcontext():
                loss.backward()
        wrapped.finish_gradient_synchronization()
        for optimizer in optimizers:
            optimizer.step()
        # A rank that sees a difference stays to the end: the others may wait for it in their next step.
        when = f"with {type(optimizers[0]).__name__}, {how}: after step {step + 1},"
        difference = difference or _difference(alone, weights(wrapped), when)
    return difference


def _difference(alone: nn.Module, whole: dict[str, Tensor], when: str) -> str | None:
    for name, expected in alone.named_parameters():
        if not close(whole[name], expected):
            error = (whole[name] - expected).abs().max().item()
            return f"{when} {name!r} is {error:.1e} off what one process makes of the whole batch."
    return None
