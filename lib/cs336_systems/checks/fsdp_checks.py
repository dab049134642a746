"""What correct fully sharded data parallelism does, said in sentences to whoever wrote it."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from cs336_systems.checks.on_ranks import Case, Message, Work, check_on_ranks, close, from_all, observed
from cs336_systems.checks.one_process import follow_one_process, gradient_mistake
from cs336_systems.model import Embedding, Linear, RMSNorm
from cs336_systems.names import check_choice
from cs336_systems.parallel import WorkerContext

Wrap = Callable[..., nn.Module]
_SHARE = 3  # samples of one rank in one backward pass
_VOCABULARY = 24
_ALLOWED = 4  # whole weights at once: the one in use, two ahead of it, and the one before, about to be freed
_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def check_fsdp(
    fsdp_class: type[nn.Module],
    *,
    only: Sequence[str] = (),
    world_size: int = 2,
    thorough: bool = False,
    **wrapper_arguments: Any,
) -> None:
    """Try a sharding wrapper on a small model, in `world_size` CPU processes, against one process.

    The class may be defined in a notebook. It is called as `fsdp_class(module, compute_dtype=None,
    **wrapper_arguments)` and needs `.module`, `forward`, `finish_gradient_synchronization()` and
    `gather_full_parameters()`. What holds is printed, property by property.

    Args:
        only: the properties to ask for, of PROPERTIES; () asks for all.
        thorough: also ask for what the assignment does not: rows that the ranks cannot share equally, tied
            and frozen weights, several backward passes before a step, and passes under `no_sync()`.

    Raises:
        AssertionError: what is wrong, where, and how to mend it.
        ValueError: a property is unknown.
    """
    for word in only:
        check_choice("property", word, PROPERTIES)
    check_on_ranks(fsdp_class, wrapper_arguments, cases(only, thorough), world_size)


def cases(only: Sequence[str] = (), thorough: bool = False) -> list[Case]:
    """What `check_fsdp` tries, in this order."""
    asked = [case for word in only or PROPERTIES for case in PROPERTIES[word]]
    return [*asked, _odd_shapes, _several_passes, _accumulates] if thorough else asked


LAYERS = ("embedding", "up", "wide", "down", "head")


class _Toy(nn.Module):
    """Five layers and a norm. No two weights have as many elements, by which messages are told apart."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = Embedding(_VOCABULARY, 12)
        self.up = Linear(12, 36)
        self.norm = RMSNorm(36)
        self.wide = Linear(36, 48)
        self.down = Linear(48, 12)
        self.head = Linear(12, 60)
        self.scale = nn.Parameter(torch.ones(12))
        self.events: list[tuple[str, str]] = []

    def run(self, name: str, x: Tensor) -> Tensor:
        self.events.append(("enter", name))
        x = getattr(self, name)(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.events.append(("back", name)))
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.run("up", self.run("embedding", tokens)).tanh())
        x = self.run("down", self.run("wide", x).tanh())
        return self.run("head", (x * self.scale.to(x.dtype)).tanh())


@cache
def _layers_by_size() -> dict[int, str]:
    """The toy's layers, by the number of elements of their weights."""
    toy = _Toy(seed=0)
    return {getattr(toy, layer).weight.numel(): layer for layer in LAYERS}


def _gathered(message: Message) -> str:
    """The layer whose whole weight an all-gather brings, or "" of another message."""
    return _layers_by_size().get(message.buffer.numel(), "") if "gather" in message.name else ""


def _tokens(rank: int, step: int) -> Tensor:
    """This rank's share of a step's batch; every process can make every share."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(_VOCABULARY, (_SHARE,), generator=generator)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = _tokens(rank, step)
    return F.cross_entropy(model(tokens).float(), tokens)


def _whole(wrapped: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in wrapped.gather_full_parameters().items()}


def _starts_from_rank_0(context: WorkerContext, wrap: Wrap) -> str | None:
    """gather_full_parameters() returns rank 0's values, whole, by name"""
    module = _Toy(seed=context.rank)
    expected, wrapped = _Toy(seed=0), wrap(module)
    if getattr(wrapped, "module", None) is not module:
        return "`.module` is not the module that was wrapped. Set self.module = module in __init__."
    whole = _whole(wrapped)
    for name, value in expected.named_parameters():
        if name not in whole:
            return f"gather_full_parameters() has no {name!r}: it has {', '.join(whole) or 'nothing'}."
        if whole[name].shape != value.shape:
            return (
                f"gather_full_parameters() returns {name!r} of shape {tuple(whole[name].shape)}; the module "
                f"had {tuple(value.shape)}. Put the shards together in their order, and cut off padding."
            )
        if not torch.equal(whole[name], value):
            return (
                f"after wrapping, {name!r} is not that of rank 0. Broadcast every parameter from rank 0 "
                "before it is sharded, and put the shards together in the order of the ranks."
            )
    return None


def _keeps_shards(context: WorkerContext, wrap: Wrap) -> str | None:
    """of every Linear and Embedding weight a rank keeps its share, as what parameters() returns"""
    wrapped, whole = wrap(_Toy(seed=0)), _Toy(seed=0)
    sizes = {name: parameter.numel() for name, parameter in wrapped.module.named_parameters()}
    if {id(p) for p in wrapped.parameters()} != {id(p) for p in wrapped.module.parameters()}:
        return "its parameters() are not the module's. Put each shard where the module has its weight."
    for name, parameter in whole.named_parameters():
        sharded = name.removesuffix(".weight") in LAYERS
        share = -(-parameter.numel() // context.world_size)
        if name not in sizes:
            return f"after wrapping, the module has no parameter {name!r}. Its shard belongs there."
        if sharded and sizes[name] > share:
            return (
                f"after wrapping, {name!r} still has {sizes[name]} of {parameter.numel()} elements; a rank's "
                f"share is {share}. Replace it by a parameter of this rank's rows."
            )
        if not sharded and sizes[name] != parameter.numel():
            return f"{name!r} was sharded. Leave what is in no Linear or Embedding whole on every rank."
    return None


@torch.no_grad()
def _forward(context: WorkerContext, wrap: Wrap) -> str | None:
    """forward computes with the whole weights, and leaves the shards in place"""
    wrapped, alone = wrap(_Toy(seed=0)), _Toy(seed=0)
    sizes = [parameter.numel() for parameter in wrapped.parameters()]
    gathers: dict[str, Work | None] = {}
    early: list[str] = []

    def before(layer: str, *_: Any) -> None:
        work = gathers.get(layer)
        if work is not None and not work.waited_for:
            early.append(layer)
            work.wait()  # or freeing its memory may crash

    for layer in LAYERS:
        getattr(wrapped.module, layer).register_forward_pre_hook(partial(before, layer))
    tokens = _tokens(context.rank, 0)
    with observed(lambda message: gathers.update({_gathered(message): message.work})):
        outputs = wrapped(tokens)
    if early:
        return (
            f"{early[0]!r} computes while its weight may still be on its way. wait() for the handle of its "
            "all-gather before the layer begins."
        )
    if sizes != [parameter.numel() for parameter in wrapped.parameters()]:
        return "after forward, parameters() are not the shards any more. Put them back behind each layer."
    if not close(outputs, alone(tokens)):
        return "its forward is not the module's. Does every layer compute with its own, whole weight?"
    return None


def _gradients(context: WorkerContext, wrap: Wrap) -> str | None:
    """every .grad has its parameter's shape and dtype, and is the mean over the ranks"""
    own, total, wrapped = _Toy(seed=0), _Toy(seed=0), wrap(_Toy(seed=0))
    _loss(own, context.rank, 0).backward()
    for rank in range(context.world_size):
        _loss(total, rank, 0).backward()
    before = _whole(wrapped)
    _loss(wrapped, context.rank, 0).backward()
    wrapped.finish_gradient_synchronization()
    problem = _of_wrong_kind(wrapped)
    if any(from_all(problem)):
        return problem
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    after = _whole(wrapped)
    # With a learning rate of 1 the update is the gradient, however the ranks share it.
    hint = (
        " Does each rank get the rows that belong to its shard, and does backward compute with the whole "
        "weights?"
    )
    for (name, parameter), mine in zip(total.named_parameters(), own.parameters(), strict=True):
        if torch.equal(before[name], after[name]):
            return f"a step of SGD does not change {name!r}. Optimizers update parameters(), by their .grad."
        update = before[name] - after[name]
        if mistake := gradient_mistake(name, update, mine.grad, parameter.grad, context.world_size, hint):
            return mistake
    return None


def _of_wrong_kind(wrapped: nn.Module) -> str | None:
    for name, parameter in wrapped.module.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            return f"{name!r} has no gradient after finish_gradient_synchronization()."
        if gradient.shape != parameter.shape:
            return (
                f"the gradient of {name!r} has shape {tuple(gradient.shape)} and its shard "
                f"{tuple(parameter.shape)}. Reduce-scatter it: each rank keeps the rows of its shard."
            )
        if gradient.dtype != parameter.dtype:
            return (
                f"the gradient of {name!r} is {gradient.dtype} and its shard {parameter.dtype}. "
                "Cast it after the reduce-scatter."
            )
    return None


def _trains(context: WorkerContext, wrap: Wrap) -> str | None:
    """the weights follow one process that has the whole batch, with SGD and with AdamW"""
    adamw = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
    problems = [_stale(context, wrap), _follow(context, wrap), _follow(context, wrap, make_optimizer=adamw)]
    return next(filter(None, problems), None)


def _stale(context: WorkerContext, wrap: Wrap, dtype: torch.dtype | None = None) -> str | None:
    """Which weights from before an optimizer's step forward computes with, as far as its outputs tell."""
    wrapped, tokens = wrap(_Toy(seed=0), compute_dtype=dtype), _tokens(context.rank, 0)
    older = _whole(wrapped)
    _loss(wrapped, context.rank, 0).backward()
    wrapped.finish_gradient_synchronization()
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    now = _whole(wrapped)
    sharded = [f"{layer}.weight" for layer in LAYERS]
    candidates = {"": now, "the weights": now | {name: older[name] for name in sharded}}
    if dtype is None:  # otherwise rounding hides a single one
        candidates |= {repr(name): now | {name: older[name]} for name in sharded}
    with torch.no_grad():
        outputs, probe, errors = wrapped(tokens), _Toy(seed=0), {}
        for name, weights in candidates.items():
            probe.load_state_dict(weights)
            errors[name] = (probe(tokens) - outputs).norm().item()
    if nearest := min(errors, key=errors.__getitem__):
        return (
            f"forward computes with {nearest} from before the optimizer's step. Gather from the shards as "
            "they are now, cast anew if they are cast, in every forward."
        )
    return None


class _Held:
    """The layers whose whole weights have memory: those that were gathered, and those that autograd keeps."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[str, StorageWeakRef]] = {}
        self.most = 0

    def note(self, tensor: Tensor) -> Tensor:
        if layer := _layers_by_size().get(tensor.numel()):
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = layer, StorageWeakRef(storage)
        self.most = max(self.most, len(self.layers(allowed=max(self.most, _ALLOWED))))
        return tensor

    def layers(self, allowed: int) -> list[str]:
        """Those there are after a second at most, in which more than are allowed may go.

        What only a cycle of Python's keeps is no fault, nor what a thread of Gloo's has yet to let go of.
        """
        until = time.monotonic() + 1
        while len(alive := self._alive()) > allowed and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        return alive

    def _alive(self) -> list[str]:
        alive = set()
        for layer, reference in self.seen.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes() > 0:
                alive.add(layer)
        return sorted(alive)


def _frees(context: WorkerContext, wrap: Wrap) -> str | None:
    """whole weights are freed after use, in forward and in backward"""
    wrapped, held, problems = wrap(_Toy(seed=0)), _Held(), []

    def on_message(message: Message) -> None:
        if _gathered(message):
            held.note(message.buffer)

    with observed(on_message), torch.autograd.graph.saved_tensors_hooks(held.note, lambda kept: kept):
        for step in range(2):
            loss = _loss(wrapped, context.rank, step)
            kept = held.layers(allowed=1)
            if len(kept) > 1:  # backward begins with the last
                problems.append(
                    f"after forward the whole weights of these layers still have memory: {', '.join(kept)}. "
                    "Autograd keeps what the layers computed with: free its storage, "
                    "tensor.untyped_storage().resize_(0), and gather into the same tensor for backward."
                )
            loss.backward()
            wrapped.finish_gradient_synchronization()
            if kept := held.layers(allowed=0):
                problems.append(
                    f"after backward the whole weights of these layers still have memory: {', '.join(kept)}. "
                    "Free each once its gradient is there."
                )
    if held.most > _ALLOWED:
        problems.append(
            f"{held.most} whole weights have memory at once; allowed: the one in use and two ahead of it."
        )
    return next(iter(problems), None)


def _reduces(context: WorkerContext, wrap: Wrap) -> str | None:
    """gradients are reduce-scattered: nobody receives more than its share"""
    wrapped, messages = wrap(_Toy(seed=0)), []
    with observed(messages.append):
        _loss(wrapped, context.rank, 0).backward()
        wrapped.finish_gradient_synchronization()
    for message in messages:
        layer = _layers_by_size().get(message.buffer.numel())
        if layer and message.name in ("all_reduce", "reduce"):
            return (
                f"the whole gradient of {layer!r} went through {message.name}, which sends twice as much as "
                "needed and holds it whole. Use reduce_scatter."
            )
    return None


def _ahead(context: WorkerContext, wrap: Wrap) -> str | None:
    """the all-gathers are under way before they are needed, at most two layers ahead"""
    module = _Toy(seed=0)
    wrapped, events = wrap(module), module.events

    def on_message(message: Message) -> None:
        if layer := _gathered(message):
            events.append(("gather" if message.work else "wait", layer))

    for step in range(2):
        events.clear()
        with observed(on_message):
            _loss(wrapped, context.rank, step).backward()
            events.append(("over", ""))
            wrapped.finish_gradient_synchronization()
    turn = next(i for i, event in enumerate(events) if event[0] == "back")
    return next(_late_or_early(events[:turn], events[turn:]), None)


def _late_or_early(forward: list[tuple[str, str]], backward: list[tuple[str, str]]) -> Iterator[str]:
    for layer in LAYERS:
        if ("wait", layer) in forward + backward:
            yield (
                f"the all-gather of {layer!r} is waited for where it starts, so nothing hides it. Start it "
                "with async_op=True, ahead of use, and wait for it when its layer begins."
            )
    for number, layer in enumerate(LAYERS):
        if ("gather", layer) not in forward:
            yield f"forward does not gather {layer!r}; the weight that it computes with may be stale."
            return
        start = forward.index(("gather", layer))
        if number > 0 and start > forward.index(("enter", layer)):
            yield (
                f"the all-gather of {layer!r} starts only when its layer begins, so nothing hides it. Note "
                "the layers' order in the first forward, and from then on start it one or two layers earlier."
            )
        if number > 2 and start < forward.index(("enter", LAYERS[number - 2])):
            yield (
                f"{layer!r} is gathered before the layer three before it is done; allowed: two layers ahead, "
                "or the memory that sharding saves is spent again."
            )
    for number, layer in enumerate(LAYERS[:-2]):
        reached = backward.index(("back", LAYERS[number + 1]))
        if ("gather", layer) in backward[reached:]:
            yield (
                f"in backward the all-gather of {layer!r} starts only when its layer is reached. Start it "
                "one or two layers earlier, in the reverse of forward's order."
            )


def _low_precision(context: WorkerContext, wrap: Wrap) -> str | None:
    """with compute_dtype=torch.bfloat16, weights travel in it; shards, gradients and updates stay float32"""
    wrapped, low = wrap(_Toy(seed=0), compute_dtype=torch.bfloat16), torch.bfloat16
    messages: list[Message] = []
    tokens = _tokens(context.rank, 0)
    with observed(messages.append):
        outputs = wrapped(tokens)
        F.cross_entropy(outputs.float(), tokens).backward()
        wrapped.finish_gradient_synchronization()
    problem = next(_not_low(wrapped, outputs, messages, low), None)
    if any(from_all(problem)):
        return problem
    before = _whole(wrapped)
    torch.optim.SGD(wrapped.parameters(), lr=1e-3).step()
    after = _whole(wrapped)
    for layer in LAYERS:
        old, new = before[f"{layer}.weight"], after[f"{layer}.weight"]
        if torch.equal(old, new) or torch.equal(new, new.to(low).float()):
            problem = problem or (
                f"the weight of {layer!r} is kept in {low}, where small updates are lost. Keep the shard in "
                "float32 and cast a copy for each gather."
            )
    stale = _stale(context, wrap, low)
    return problem or (f"with compute_dtype={low}, {stale}" if stale else None)


def _not_low(wrapped: nn.Module, outputs: Tensor, messages: list[Message], low: torch.dtype) -> Iterator[str]:
    if problem := _of_wrong_kind(wrapped):
        yield problem
    for message in messages:
        if (layer := _gathered(message)) and message.buffer.dtype != low:
            yield (
                f"with compute_dtype={low}, {layer!r} is gathered in {message.buffer.dtype}. Cast the "
                "shard before it is sent: that halves the bytes."
            )
    if outputs.dtype != low:
        yield f"with compute_dtype={low}, the layers compute in {outputs.dtype}."
    for name, parameter in wrapped.module.named_parameters():
        if parameter.dtype != torch.float32:
            yield f"with compute_dtype={low}, the shard of {name!r} is {parameter.dtype}, not float32."


class _Odd(nn.Module):
    """Rows that no two ranks share equally, tied and frozen weights, and one that is never used."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = Embedding(_VOCABULARY + 1, 5)
        self.up = Linear(5, 3)
        self.frozen = Linear(3, 5)
        self.frozen.weight.requires_grad_(False)
        self.unused = Linear(5, 5)
        self.head = Linear(5, _VOCABULARY + 1)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.up(self.embedding(tokens)).tanh()))


def _odd_shapes(context: WorkerContext, wrap: Wrap) -> str | None:
    """odd numbers of rows, tied, frozen and unused weights"""
    return _follow(context, wrap, make=_Odd)


def _several_passes(context: WorkerContext, wrap: Wrap) -> str | None:
    """three backward passes before finish_gradient_synchronization()"""
    return _follow(context, wrap, passes=3)


def _accumulates(context: WorkerContext, wrap: Wrap) -> str | None:
    """two backward passes under no_sync(), then one that communicates"""
    return _follow(context, wrap, passes=3, silent=2)


def _follow(
    context: WorkerContext,
    wrap: Wrap,
    *,
    make: Callable[[int], nn.Module] = _Toy,
    passes: int = 1,
    silent: int = 0,
    make_optimizer: Callable[..., torch.optim.Optimizer] = _SGD,
) -> str | None:
    def losses(model: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
        return (_loss(model, rank, step + 100 * number) for number in range(passes))

    how = f"{passes} passes a step, {silent} of them under no_sync()" if passes > 1 else "one pass a step"
    alone, wrapped = make(0), wrap(make(context.rank))
    return follow_one_process(context, alone, wrapped, losses, make_optimizer, _whole, how, silent)


# What can be asked for, in the order in which an FSDP is written.
PROPERTIES: dict[str, tuple[Case, ...]] = {
    "shards": (_starts_from_rank_0, _keeps_shards),
    "forward": (_forward,),
    "backward": (_gradients, _reduces, _trains),
    "memory": (_frees,),
    "prefetch": (_ahead,),
    "precision": (_low_precision,),
}
