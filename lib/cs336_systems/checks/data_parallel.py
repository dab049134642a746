"""What the checks of DDP and FSDP share: a toy, its loss, and training compared with one process."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cs336_systems.checks.on_ranks import close, holds, unlike
from cs336_systems.model import Embedding, Linear, RMSNorm
from cs336_systems.parallel import WorkerContext

VOCABULARY = 24
Wrap = Callable[..., nn.Module]
Make = Callable[[int], nn.Module]  # of a seed
Weights = Callable[[nn.Module], dict[str, Tensor]]  # of a wrapped module, whole and by name
_STEPS = 4
_OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
}


class Toy(nn.Module):
    """Tied, frozen and (on request) unused weights, buffers, and rows that ranks cannot share equally."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first = Embedding(VOCABULARY + 1, 3)
        self.frozen = Linear(5, 3).requires_grad_(False)
        self.rarely = Linear(3, VOCABULARY + 1)  # its gradient comes before those of the layers behind it
        self.up = Linear(3, 5)
        self.norm = RMSNorm(5)
        self.last = Linear(3, VOCABULARY + 1)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.randn(5))
        self.register_buffer("mask", torch.rand(5) < 0.5)

    def forward(self, tokens: Tensor, rarely: bool = True) -> Tensor:
        x = self.norm(self.up(self.first(tokens)).tanh()) + torch.where(self.mask, self.shift, -self.shift)
        x = self.frozen(x).tanh()
        return self.rarely(x) + self.last(x) if rarely else self.last(x)


def tokens_of(rank: int, step: int) -> Tensor:
    """A rank's share of a step's batch; every process can make every share."""
    generator = torch.Generator("cpu").manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (3,), generator=generator, device="cpu")


def loss_of(model: nn.Module, rank: int, step: int, **options: bool) -> Tensor:
    tokens = tokens_of(rank, step).to(next(model.parameters()).device)
    return F.cross_entropy(model(tokens, **options).float(), tokens)


def one_step(context: WorkerContext, wrapped: nn.Module) -> None:
    loss_of(wrapped, context.rank, 0).backward()
    wrapped.finish_gradient_synchronization()


def starts_from_rank_0(
    context: WorkerContext, wrap: Wrap, make: Make, weights: Weights, hint: str
) -> Iterator[str]:
    module = make(context.rank)
    wrapped = wrap(module)
    if getattr(wrapped, "module", None) is not module:
        yield "`.module` is not the module that was wrapped. Set self.module = module in __init__."
    found = weights(wrapped)
    for name, wanted in make(0).state_dict().items():
        if name not in found:
            yield f"it has no {name!r}, but {', '.join(found) or 'nothing'}. Use the module's own names."
        if found[name].shape != wanted.shape:
            yield f"{name!r} has shape {tuple(found[name].shape)}, not {tuple(wanted.shape)}. {hint}"
        if not torch.equal(found[name], wanted):
            yield f"after wrapping, {name!r} is not that of rank 0. {hint}"


def average_mistakes(
    context: WorkerContext, make: Make, found: dict[str, Tensor], hint: str = ""
) -> Iterator[str]:
    """Of gradients by name, what they are if not the mean over the ranks."""
    own, total, ranks = make(0), make(0), context.world_size
    loss_of(own, context.rank, 0).backward()
    for rank in range(ranks):
        loss_of(total, rank, 0).backward()
    for (name, mine), of_all in zip(own.named_parameters(), total.parameters(), strict=True):
        if mine.grad is not None:
            gradient, summed = f"the gradient of {name!r} is", of_all.grad
            diagnoses = {
                f"{gradient} the sum over the ranks. Divide it by the world size.": summed,
                f"{gradient} averaged twice. Divide it by the world size once.": summed / ranks**2,
                f"{gradient} still this rank's own. Average it over the ranks, in place.": mine.grad,
            }
            otherwise = f"{gradient} not the mean over the ranks.{hint}"
            yield from unlike(found[name], summed / ranks, diagnoses, otherwise)


def follow(
    context: WorkerContext,
    wrap: Wrap,
    *,
    weights: Weights,
    how: str = "one pass a step",
    optimizer: str = "SGD",
    make: Make = Toy,
    passes: int = 1,
    silent: int = 0,
    options: Callable[[int, int, int], dict[str, bool]] = lambda *_: {},
) -> Iterator[str]:
    """Train the candidate, and one process with the whole batch: the first weight in which they differ.

    Args:
        passes: backward passes of a rank in one step, the first `silent` of them under no_sync().
        options: of the model's forward, for a rank, a step and a pass.
    """

    def losses(model: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
        return (loss_of(model, rank, step + 100 * n, **options(rank, step, n)) for n in range(passes))

    alone, wrapped, difference = make(0), wrap(make(context.rank)), ""
    if silent and not hasattr(wrapped, "no_sync"):
        yield "it has no no_sync() context, under which backward passes only accumulate."
        return
    optimizers = [_OPTIMIZERS[optimizer](model.parameters()) for model in (alone, wrapped)]
    for step in range(_STEPS):
        for each in optimizers:
            each.zero_grad()
        for rank in range(context.world_size):
            for loss in losses(alone, rank, step):
                (loss / context.world_size).backward()
        for number, loss in enumerate(losses(wrapped, context.rank, step)):
            with wrapped.no_sync() if number < silent else contextlib.nullcontext():
                loss.backward()
        wrapped.finish_gradient_synchronization()
        for each in optimizers:
            each.step()
        whole = weights(wrapped)
        for name, wanted in alone.named_parameters():
            if not difference and not close(whole[name], wanted):
                error = (whole[name] - wanted).abs().max().item()
                difference = f"after step {step + 1}, {name!r} is {error:.1e} off"
    if difference:
        yield f"{how}, with {optimizer}: {difference} what one process makes of the whole batch."


@holds("float16 gradients are divided before their sum overflows")
def float16_means(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped = wrap(nn.Sequential(Linear(6, 6, dtype=torch.float16)))
    wrapped(torch.full((1, 6), 40_000.0, dtype=torch.float16)).sum().backward()
    wrapped.finish_gradient_synchronization()
    if not all(parameter.grad.isfinite().all() for parameter in wrapped.parameters()):
        yield "of float16 gradients of 40,000 the mean is infinite: divide by the world size before the sum."


@holds("hooks of the user on parameters run, or are refused")
def hooks_run(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    module, calls = Toy(0), []
    module.first.weight.register_hook(lambda gradient: 0 * gradient)
    module.first.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    try:
        wrapped = wrap(module)
    except (NotImplementedError, RuntimeError, ValueError):
        return
    one_step(context, wrapped)
    if not calls or wrapped.module.first.weight.grad.any():
        yield "a user's hooks on a parameter do not run: keep the parameter, or refuse one that has hooks."
