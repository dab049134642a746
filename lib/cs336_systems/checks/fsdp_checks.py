"""Properties of fully sharded data parallelism, with error messages for its author."""

import gc
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.arguments import check_choice
from cs336_systems.checks import data_parallel as shared
from cs336_systems.checks.data_parallel import Wrap, close, holds, loss_of, one_step, tokens_of
from cs336_systems.checks.on_ranks import Message, Property, Unwatched, check_on_ranks, from_all, observed
from cs336_systems.model import Embedding, Linear, RMSNorm
from cs336_systems.parallel import WorkerContext

_SIZES = {"up": (12, 36), "wide": (36, 48), "down": (48, 12), "head": (12, 60)}
LAYERS = ("embedding", *_SIZES)
_WEIGHTS = 4  # whole at once: the one in use, two ahead of it, and the one before, about to be freed
_GRADIENTS = 3  # whole at once: the one that has just been made, and two on their way
_LOW = torch.bfloat16


def check_fsdp(
    fsdp_class: type[nn.Module],
    *,
    only: Sequence[str] = (),
    world_size: int = 2,
    thorough: bool = False,
    **wrapper_arguments: Any,
) -> None:
    """Try a sharding wrapper on a small model, in `world_size` CPU processes, against one process.

    It is called as `fsdp_class(module, compute_dtype=None, **wrapper_arguments)` and needs `.module`,
    `forward`, `finish_gradient_synchronization()` and `gather_full_parameters()`; see `check_on_ranks`.

    Args:
        only: the groups of properties to ask for, of PROPERTIES; () asks for all.
        thorough: also ask for what the assignment does not: rows that the ranks cannot share equally, tied
            and frozen weights, several backward passes, `no_sync()`, float16, users' hooks.

    Raises:
        ValueError: a group is unknown.
    """
    for word in only:
        check_choice("property", word, PROPERTIES)
    check_on_ranks(fsdp_class, wrapper_arguments, properties(only, thorough), world_size)


def properties(only: Sequence[str] = (), thorough: bool = False) -> list[Property]:
    """What `check_fsdp` tries, in this order."""
    tried = [each for word in only or PROPERTIES for each in PROPERTIES[word]]
    several = partial(shared.follow, weights=_whole, make=_Layers, passes=3)
    odd = partial(shared.follow, weights=_whole, options=lambda *_: {"rarely": False})
    unusual = {
        "odd numbers of rows, tied, frozen and unused weights": odd,
        "three backward passes before finish_gradient_synchronization()": several,
        "two backward passes under no_sync(), then one that communicates": partial(several, silent=2),
    }
    added = [Property(name, partial(mistakes, how=name)) for name, mistakes in unusual.items()]
    return [*tried, *added, shared.float16_means, shared.hooks_run] if thorough else tried


class _Layers(nn.Sequential):
    """Five layers and a norm. No two weights have as many elements, which identifies messages."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        super().__init__(OrderedDict(embedding=Embedding(shared.VOCABULARY, 12)))
        for name, size in _SIZES.items():
            self.add_module(name, Linear(*size))
            self.add_module(f"tanh_{name}", nn.Tanh())
        self.add_module("norm", RMSNorm(60))


@cache
def _layers_by_size() -> dict[int, str]:
    """The layers, by the number of elements of their weights."""
    module = _Layers(seed=0)
    return {getattr(module, layer).weight.numel(): layer for layer in LAYERS}


def _gathered(message: Message) -> str:
    """The layer whose whole weight an all-gather brings, or "" of another message."""
    return _layers_by_size().get(message.buffer.numel(), "") if "gather" in message.name else ""


def _whole(wrapped: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in wrapped.gather_full_parameters().items()}


@holds("gather_full_parameters() returns rank 0's values, whole, by name")
def starts_from_rank_0(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    hint = "Broadcast before sharding; put the shards together in the order of the ranks, without padding."
    return shared.starts_from_rank_0(context, wrap, _Layers, _whole, hint)


@holds("of every Linear and Embedding weight a rank keeps its share, as what parameters() returns")
def keeps_shards(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped = wrap(_Layers(seed=0))
    sizes = {name: parameter.numel() for name, parameter in wrapped.module.named_parameters()}
    if {id(p) for p in wrapped.parameters()} != {id(p) for p in wrapped.module.parameters()}:
        yield "its parameters() are not the module's. Put each shard where the module has its weight."
    for name, n in ((name, parameter.numel()) for name, parameter in _Layers(seed=0).named_parameters()):
        is_sharded, share = name.removesuffix(".weight") in LAYERS, -(-n // context.world_size)
        if name not in sizes:
            yield f"the module has no parameter {name!r} any more. Its shard belongs there."
        if is_sharded and sizes[name] > share:
            yield f"{name!r} still has {sizes[name]} of {n} elements. A rank keeps its rows, {share}."
        if not is_sharded and sizes[name] != n:
            yield f"{name!r} was sharded. Leave what is in no Linear or Embedding whole on every rank."


@holds("forward computes with the whole weights, and leaves the shards in place")
def forward(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped, tokens = wrap(_Layers(seed=0)), tokens_of(context.rank, 0)
    sizes, gathers, early = [parameter.numel() for parameter in wrapped.parameters()], {}, []

    def before(layer: str, *_: Any) -> None:
        work = gathers.get(layer)
        if work is not None and not work.waited_for:
            early.append(layer)
            work.wait()  # or freeing its memory may crash

    for layer in LAYERS:
        getattr(wrapped.module, layer).register_forward_pre_hook(partial(before, layer))
    with torch.no_grad(), observed(lambda message: gathers.update({_gathered(message): message.work})):
        outputs = wrapped(tokens)
    if early:
        yield f"{early[0]!r} computes while its weight may be on its way. wait() for its all-gather before."
    if sizes != [parameter.numel() for parameter in wrapped.parameters()]:
        yield "after forward, parameters() are not the shards any more. Put them back behind each layer."
    if not close(outputs, _Layers(seed=0)(tokens)):
        yield "its forward is not the module's. Does every layer compute with its own, whole weight?"


@holds("every .grad has its parameter's shape and dtype, and is the mean over the ranks")
def gradients(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped = wrap(_Layers(seed=0))
    before = _whole(wrapped)
    one_step(context, wrapped)
    if any(from_all(mistakes := list(_of_wrong_kind(wrapped)))):  # SGD would raise
        yield from mistakes
        return
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    after = _whole(wrapped)
    for name in before:
        if torch.equal(before[name], after[name]):
            yield f"a step of SGD does not change {name!r}. Optimizers update parameters(), by their .grad."
    # With a learning rate of 1 the update is the gradient, however the ranks share it.
    updates = {name: before[name] - after[name] for name in before}
    hint = " Does each rank get the rows of its shard, and does backward compute with the whole weights?"
    yield from shared.average_mistakes(context, _Layers, updates, hint)


def _of_wrong_kind(wrapped: nn.Module) -> Iterator[str]:
    for name, parameter in wrapped.module.named_parameters():
        if parameter.grad is None:
            yield f"{name!r} has no gradient after finish_gradient_synchronization()."
            continue
        shape, dtype = tuple(parameter.grad.shape), parameter.grad.dtype
        gradient, needs = f"the gradient of {name!r} has", f"and its shard {tuple(parameter.shape)}"
        if shape != parameter.shape:
            yield f"{gradient} shape {shape} {needs}. Reduce-scatter it: keep the rows of the shard."
        if dtype != parameter.dtype:
            yield f"{gradient} dtype {dtype} and its shard {parameter.dtype}. Cast after the reduce-scatter."


@holds("gradients are reduce-scattered: no rank receives more than its share")
def reduces(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped, messages = wrap(_Layers(seed=0)), list[Message]()
    with observed(messages.append):
        one_step(context, wrapped)
    for message in messages:
        layer = _layers_by_size().get(message.buffer.numel())
        if layer and message.name in ("all_reduce", "reduce"):
            yield f"the whole gradient of {layer!r} went through {message.name}. Use reduce_scatter."


@holds("the weights follow one process that has the whole batch, with SGD and with AdamW")
def trains(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    alike = partial(shared.follow, context, wrap, weights=_whole, make=_Layers)
    runs = _stale(context, wrap), alike(optimizer="SGD"), alike(optimizer="AdamW")
    yield from filter(None, [next(run, None) for run in runs])


def _stale(context: WorkerContext, wrap: Wrap, dtype: torch.dtype | None = None) -> Iterator[str]:
    """Which weights from before an optimizer's step forward computes with, as far as its outputs tell."""
    wrapped, tokens = wrap(_Layers(seed=0), compute_dtype=dtype), tokens_of(context.rank, 0)
    older = {name: x for name, x in _whole(wrapped).items() if name.removesuffix(".weight") in LAYERS}
    one_step(context, wrapped)
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    now, probe, errors = _whole(wrapped), _Layers(seed=0), {}
    candidates = {"": now, "the weights": now | older}
    if dtype is None:  # otherwise rounding hides a single one
        candidates |= {repr(name): now | {name: tensor} for name, tensor in older.items()}
    with torch.no_grad():
        outputs = wrapped(tokens)
        for name, weights in candidates.items():
            probe.load_state_dict(weights)
            errors[name] = (probe(tokens) - outputs).norm().item()
    if nearest := min(errors, key=errors.__getitem__):
        yield f"forward computes with {nearest} from before the optimizer's step. Gather anew."


class _Whole:
    """The layers of which something whole that was noted, a weight or a gradient, still has memory."""

    def __init__(self, allowed: int) -> None:
        self.seen: dict[int, tuple[str, StorageWeakRef]] = {}
        self.most, self.allowed = 0, allowed

    def note(self, tensor: Tensor) -> Tensor:
        if layer := _layers_by_size().get(tensor.numel()):
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = layer, StorageWeakRef(storage)
        self.most = max(self.most, len(self.layers(allowed=max(self.most, self.allowed))))
        return tensor

    def layers(self, allowed: int) -> list[str]:
        """Those that keep memory after at most a second, in which cycles and Gloo's threads may free some."""
        until = time.monotonic() + 1
        while len(alive := sorted(set(self._alive()))) > allowed and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        return alive

    def _alive(self) -> Iterator[str]:
        for layer, reference in self.seen.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes() > 0:
                yield layer


@holds("whole weights are freed after use, in forward and in backward, and whole gradients too")
def frees(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped, mistakes = wrap(_Layers(seed=0)), []
    whole, reduced = _Whole(_WEIGHTS), _Whole(_GRADIENTS)
    still = "the whole weights of these layers still have memory:"
    mend = "Autograd keeps them: free by untyped_storage().resize_(0), gather into the same tensor again."

    def on_message(message: Message) -> None:
        if _gathered(message):
            whole.note(message.buffer)
        elif "reduce" in message.name:
            reduced.note(message.buffer)

    with observed(on_message), torch.autograd.graph.saved_tensors_hooks(whole.note, lambda kept: kept):
        for step in range(2):
            loss = loss_of(wrapped, context.rank, step)
            if len(kept := whole.layers(allowed=1)) > 1:  # backward begins with the last
                mistakes.append(f"after forward {still} {', '.join(kept)}. {mend}")
            loss.backward()
            wrapped.finish_gradient_synchronization()
            if kept := whole.layers(allowed=0):
                mistakes.append(f"after backward {still} {', '.join(kept)}. Free each with its gradient.")
    yield from mistakes
    if whole.most > _WEIGHTS:
        yield f"{whole.most} whole weights have memory at once; allowed: the one in use and two ahead of it."
    if reduced.most > _GRADIENTS:
        yield f"{reduced.most} whole gradients have memory at once. Wait for the oldest before a third goes."


@holds("the all-gathers are under way before they are needed, at most two layers ahead")
def prefetches(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped, events = wrap(_Layers(seed=0)), list[tuple[str, str]]()

    def on_message(message: Message) -> None:
        if layer := _gathered(message):
            events.append(("gather" if message.work else "wait", layer))

    def on_entry(layer: str, *_: Any) -> None:
        events.append(("enter", layer))

    def on_result(layer: str, module: nn.Module, inputs: Any, result: Tensor) -> None:
        result.register_hook(lambda _: events.append(("back", layer)))

    for layer in LAYERS:
        module = getattr(wrapped.module, layer)
        module.register_forward_pre_hook(partial(on_entry, layer), prepend=True)
        module.register_forward_hook(partial(on_result, layer))
    for step in range(2):
        events.clear()
        with observed(on_message):
            loss_of(wrapped, context.rank, step).backward()
            events.append(("over", ""))
            wrapped.finish_gradient_synchronization()
    if not {"gather", "wait"} & {what for what, _ in events}:
        yield Unwatched("its gathers are no all-gathers of torch.distributed")
    turn = next(i for i, event in enumerate(events) if event[0] == "back")
    before, after = events[:turn], events[turn:]
    for layer in LAYERS:
        if ("wait", layer) in events:
            yield f"the all-gather of {layer!r} is waited for where it starts. Start it with async_op=True."
        if ("gather", layer) not in before:
            yield f"forward does not gather {layer!r}; the weight that it computes with may be stale."
    for number, layer in enumerate(LAYERS):
        start, gather = before.index(("gather", layer)), f"the all-gather of {layer!r}"
        if number > 0 and start > before.index(("enter", layer)):
            yield f"{gather} starts only when its layer begins. Start it earlier, in forward's order."
        if number > 2 and start < before.index(("enter", LAYERS[number - 2])):
            yield f"{gather} starts before the layer three before it is done; allowed: two layers ahead."
    for number, layer in enumerate(LAYERS[:-2]):
        if ("gather", layer) in after[after.index(("back", LAYERS[number + 1])) :]:
            yield f"in backward {layer!r} is gathered only when it is reached. Start it earlier, in reverse."


@holds(f"with compute_dtype={_LOW}, weights travel in it; shards, gradients and updates stay float32")
def low_precision(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped, messages, outputs = wrap(_Layers(seed=0), compute_dtype=_LOW), list[Message](), []
    wrapped.module.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    with observed(messages.append):
        one_step(context, wrapped)
    mistakes = list(_of_wrong_kind(wrapped))
    if outputs and outputs[0].dtype != _LOW:
        mistakes.append(f"the layers compute in {outputs[0].dtype}. Gather into a tensor of compute_dtype.")
    gathered = {layer: x.buffer.dtype for x in messages if (layer := _gathered(x))}
    wrong = {layer: dtype for layer, dtype in gathered.items() if dtype != _LOW}
    mistakes += [f"{n!r} is gathered in {d}. Cast the shard before it is sent." for n, d in wrong.items()]
    shards = dict(wrapped.module.named_parameters())
    kinds = {name: shard.dtype for name, shard in shards.items() if shard.dtype != torch.float32}
    mistakes += [f"the shard of {name!r} is {kind}, not float32." for name, kind in kinds.items()]
    shapes = {shard.shape for shard in shards.values()}
    low = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype == _LOW and x.shape in shapes]
    low = [x for x in low if x.untyped_storage().nbytes() == x.nbytes]  # no slices of a whole weight
    if set(map(id, low)) - {id(shard.grad) for shard in shards.values()}:
        mistakes.append("casts of shards live on. When a gather has arrived, drop what was sent for it.")
    if not any(from_all(mistakes)):  # else SGD may raise
        before = _whole(wrapped)
        torch.optim.SGD(wrapped.parameters(), lr=1e-3).step()
        after = _whole(wrapped)
        for name in (f"{layer}.weight" for layer in LAYERS):
            rounded = after[name].to(_LOW).float()
            if torch.equal(before[name], after[name]) or torch.equal(rounded, after[name]):
                mistakes.append(f"{name!r} loses small updates: keep it in float32, cast a copy to gather.")
        mistakes += _stale(context, wrap, _LOW)
    yield from (f"with compute_dtype={_LOW}, {mistake}" for mistake in mistakes)


# The groups that can be asked for, in the order in which an FSDP is written.
PROPERTIES = {
    "shards": [starts_from_rank_0, keeps_shards],
    "forward": [forward],
    "backward": [gradients, reduces, trains],
    "memory": [frees],
    "prefetch": [prefetches],
    "precision": [low_precision],
}
