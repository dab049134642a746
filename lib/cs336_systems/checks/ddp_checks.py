"""Properties of a data-parallel wrapper, with error messages for its author; FSDP's share most of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from cs336_systems.checks.on_ranks import (
    MEET,
    Property,
    checker_in_any_world,
    close,
    comes,
    observed,
    open_store,
    unlike,
)
from cs336_systems.model import Embedding, Linear, RMSNorm

VOCABULARY = 24


@checker_in_any_world
def check_ddp(wrap, *, thorough=False, users=None, overlapped=False):
    """Try a data-parallel wrapper on a small model, in `world_size` CPU processes, against one process.

    It is called as `wrap(module, **options)`, with the options that are not among these, and needs `.module`,
    `forward` and `finish_gradient_synchronization()`; see `on_ranks.checker`.

    Args:
        thorough: also ask for what the assignment does not: parameters unused on some ranks or on all,
            several backward passes before a step.
        users: of these only parameters that so many ranks use, rank 0 first.
        overlapped: also ask that messages leave during backward, which waits for none, and where each
            gradient is one, as soon as the order allows.
    """
    yield from starts_from_rank_0(
        wrap, "Broadcast every parameter and buffer from rank 0 in __init__."
    )
    yield Property("parameters and buffers are rank 0's")
    yield from gradients(wrap)
    yield Property("gradients are the mean over the ranks")
    if overlapped:
        yield from _overlaps(wrap)
    yield from follow(wrap, "one backward pass a step")
    if thorough:
        yield from follow(
            wrap,
            "three backward passes before finish_gradient_synchronization()",
            passes=3,
            options=lambda rank, step, number: {"rarely": number != 1},
        )
        yield from follow(
            wrap,
            "parameters that in a step only rank 0 uses, or no rank does",
            options=lambda rank, step, _: {"rarely": step % 2 == 1 and rank == 0},
        )
    elif users is not None:
        yield from follow(
            wrap,
            f"parameters that {users} of {dist.get_world_size()} ranks use",
            options=lambda rank, *_: {"rarely": rank < users},
        )


class Toy(nn.Module):
    """Tied, frozen and (on request) unused weights, buffers, and rows that ranks cannot share equally."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = Embedding(VOCABULARY + 1, 3)
        self.frozen = Linear(5, 3).requires_grad_(False)
        # Its gradient comes before those of the layers behind it.
        self.rarely = Linear(3, VOCABULARY + 1)
        self.up = Linear(3, 5)
        norm = RMSNorm(5)
        norm.register_buffer("shift", torch.randint(3, (5,)))
        self.inner = nn.Sequential(norm)
        self.last = Linear(3, VOCABULARY + 1)
        self.last.weight = self.first.weight

    def forward(self, tokens, rarely=True):
        x = self.up(self.first(tokens)).tanh()
        x = self.frozen(self.inner(x) + self.inner[0].shift).tanh()
        return self.rarely(x) + self.last(x) if rarely else self.last(x)


def module_state(wrapped):
    return {name: tensor.clone() for name, tensor in wrapped.module.state_dict().items()}


def tokens_of(rank, step=0):
    """A rank's share of a step's batch; every process can make every share."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (3,), generator=generator)


def loss_of(model, rank, step=0, **options):
    tokens = tokens_of(rank, step)
    return F.cross_entropy(model(tokens, **options).float(), tokens)


def one_step(wrapped):
    loss_of(wrapped, dist.get_rank()).backward()
    wrapped.finish_gradient_synchronization()


def starts_from_rank_0(wrap, hint, make=Toy, weights=module_state):
    """On every rank; `weights` are those of a wrapped module, whole and by name."""
    module = make(dist.get_rank())
    wrapped = wrap(module)
    if getattr(wrapped, "module", None) is not module:
        yield "`.module` is not the module that was wrapped. Set self.module = module in __init__."
    tensors = weights(wrapped)
    for name, wanted in make(0).state_dict().items():
        if name not in tensors:
            yield f"it has no {name!r}. Use the module's own names."
        if not torch.equal(tensors[name], wanted):
            yield f"after wrapping, {name!r} is not that of rank 0. {hint}"


def gradients(wrap, hint="", make=Toy, weights=module_state):
    """What they are if not the mean over the ranks, however these share them: by a step of SGD with lr=1."""
    ranks = dist.get_world_size()
    wrapped = wrap(make(0))
    alone = make(0)
    together = make(0)
    one_step(wrapped)
    loss_of(alone, dist.get_rank()).backward()
    sum(loss_of(together, rank) for rank in range(ranks)).backward()
    before = weights(wrapped)
    for name, old in alone.named_parameters():
        if not close(before[name], old):
            yield f"{name!r} has changed before any optimizer step. All-reduce parameter.grad, not parameter."
    frozen = [name for name, x in alone.named_parameters() if not x.requires_grad]
    yield from wrong_kinds(wrapped, frozen)
    yield MEET  # SGD would raise
    SGD(wrapped.parameters(), lr=1.0).step()
    wrong = f"not the mean over the ranks (dist.get_world_size() is {ranks} here)"
    otherwise = f"{wrong}, or parameters() are not updated by it.{hint}"
    after = weights(wrapped)
    for name, own in alone.named_parameters():
        if name in frozen:
            continue
        total = together.get_parameter(name).grad
        diagnoses = {
            "the sum over the ranks. Divide it by the world size.": total,
            "averaged twice. Divide it by the world size once.": total / ranks**2,
            "still this rank's own. Average it over the ranks, in place.": own.grad,
        }
        yield from unlike(
            f"the gradient of {name!r}",
            before[name] - after[name],
            total / ranks,
            diagnoses,
            otherwise,
        )


def wrong_kinds(wrapped, frozen=()):
    """Gradients that are missing after a step, or that no optimizer would take; a shard may be renamed."""
    for name, parameter in wrapped.module.named_parameters():
        gradient = parameter.grad
        if name in frozen:
            if gradient is not None:
                yield f"the frozen parameter {name!r} was given a gradient. Skip those without requires_grad."
        elif gradient is None:
            yield f"{name!r} has no gradient after finish_gradient_synchronization()."
        else:
            kind = f"{tuple(gradient.shape)}, {gradient.dtype}"
            wanted = f"{tuple(parameter.shape)}, {parameter.dtype}"
            if kind != wanted:
                kinds = f"the gradient of {name!r} is {kind}, its shard {wanted}"
                yield f"{kinds}. Keep the rows of the shard, and cast after the reduce-scatter."
            if not gradient.isfinite().all():
                yield f"the gradient of {name!r} has NaNs. Is padding sent that nobody has set to zero?"


def _overlaps(wrap):
    wrapped = wrap(Toy(0))
    store = open_store()
    ready = []
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            # It is called after the wrapper's own hook.
            parameter.register_post_accumulate_grad_hook(ready.append)
    for first in range(dist.get_world_size()):
        ready.clear()
        wrapped.zero_grad()
        yield from _late_messages(wrapped, ready, store, first)
    yield Property("messages leave during backward, which waits for none")


def _late_messages(wrapped, ready, store, first):
    """In a step in which the others send nothing until backward of the first rank is over.

    ready: grows by each parameter whose gradient is there.
    """
    own_rank = dist.get_rank()
    ended = f"backward of rank {first}"
    sent = []

    def note(message):
        # Gradients, not flags or an order of what is unused.
        if message.dtype.is_floating_point:
            sent.append((len(ready), message.numel))

    # Unless something is wrong, the ranks only meet at the `yield`.
    mistake = MEET
    with observed(note):
        loss = loss_of(wrapped, own_rank)
        # Nothing that it waits for, in whichever way, can arrive while the others send nothing.
        if own_rank != first and not comes(store, ended):
            mistake = (
                f"{ended} waits for messages. Use async_op=True, keep each handle, and wait() in "
                "finish_gradient_synchronization()."
            )
        loss.backward()
        store.set(ended, "")
        wrapped.finish_gradient_synchronization()
    yield mistake
    yield from _late(sent, ready)


def _late(sent, ready):
    """sent: of each message how many gradients were ready before the one whose hook sent it, and its size."""
    if not sent:
        yield "no message was seen. Send gradients with dist.all_reduce(..., async_op=True)."
    behind = sum(before == len(ready) for before, _ in sent)
    if behind:
        yield f"{behind} of {len(sent)} messages leave only when backward is over."
    if sent[0][0] == len(ready) - 1:
        yield "all messages leave with the last gradient. Send each as soon as it may leave."
    if len(sent) == len(ready):
        # One gradient each: what a hook sends first is its own, or has waited. Of equal keys the last stays.
        first_sizes = dict(reversed(sent))
        for before, size in first_sizes.items():
            if size < ready[before].numel():
                yield "a gradient that may leave waits for another one. Send each as soon as it may leave."


def follow(wrap, how, make=Toy, weights=module_state, passes=1, options=lambda *_: {}):
    """Train the candidate, and one process with the whole batch: the first weight in which they differ.

    Args:
        how: the name of the property.
        passes: backward passes of a rank in one step.
        options: of a rank, a step and a pass: arguments of the model's forward.
    """
    own_rank = dist.get_rank()
    ranks = dist.get_world_size()
    alone = make(0)
    wrapped = wrap(make(own_rank))
    parameters = list(alone.parameters()) + list(wrapped.parameters())
    optimizer = SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for n in range(passes):
            data = step + 100 * n
            for rank in range(ranks):
                (loss_of(alone, rank, data, **options(rank, step, n)) / ranks).backward()
            loss_of(wrapped, own_rank, data, **options(own_rank, step, n)).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        whole = weights(wrapped)
        for name, wanted in alone.named_parameters():
            if not close(whole[name], wanted):
                off = f"{name!r} is {(whole[name] - wanted).abs().max():.1e} off"
                yield f"{how}: after step {step + 1}, {off} what one process makes of the whole batch."
        yield MEET
    yield Property(how)
