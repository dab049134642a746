"""Properties of fully sharded data parallelism, with error messages for its author."""

import gc
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from cs336_systems.arguments import check_choice
from cs336_systems.checks import ddp_checks as shared
from cs336_systems.checks.ddp_checks import VOCABULARY, Wrap, loss_of, one_step, tokens_of
from cs336_systems.checks.on_ranks import Findings, Property, checker, close, observed
from cs336_systems.model import Embedding, Linear, RMSNorm

# No two have as many elements, nor has one's share on 2, 3, 4 or 6 ranks, which identifies messages.
_SIZES = {
    "embedding": (VOCABULARY, 12),
    "up": (12, 60),
    "wide": (60, 84),
    "down": (84, 12),
    "head": (12, 132),
}
_LAYER_OF = {prod(size): layer for layer, size in _SIZES.items()}
LAYERS = tuple(_SIZES)
# Of 61 rows ranks have no equal shares, so messages are padded.
_UNEVEN = _SIZES | {"up": (12, 61), "wide": (61, 84)}
_MOST = {
    # Whole at once: the one in use, two ahead of it, and the one before, about to be freed.
    "all_gather": (4, "weights have memory at once; allowed: the one in use and two ahead of it."),
    # The one that has just been made, and two on their way.
    "reduce_scatter": (
        3,
        "gradients have memory at once. Wait for the oldest before a third goes.",
    ),
}
_LOW = torch.bfloat16
_IN_LOW = f"with compute_dtype={_LOW}"


@checker
def check_fsdp(wrap: Wrap, *, only: Sequence[str] = ()) -> Findings:
    """Try a sharding wrapper on a small model, in `world_size` CPU processes, against one process.

    It is called as `fsdp_class(module, compute_dtype=None, **options)` and needs `.module`, `forward`,
    `finish_gradient_synchronization()` and `gather_full_parameters()`; see `on_ranks.checker`.

    Args:
        only: the groups of properties to ask for, of GROUPS; () asks for all.
    """
    for group in only or GROUPS:
        check_choice("property", group, GROUPS)
        yield from GROUPS[group](wrap)


class _Layers(nn.Sequential):
    """Five layers and a norm."""

    def __init__(self, seed, sizes=_SIZES):
        torch.manual_seed(seed)
        super().__init__()
        for layer, size in sizes.items():
            kind = Embedding if layer == "embedding" else Linear
            self.add_module(layer, kind(*size))
            self.add_module(f"tanh_{layer}", nn.Tanh())
        self.add_module("norm", RMSNorm(132))


_uneven = partial(_Layers, sizes=_UNEVEN)


def _gathered(message):
    """The layer whose whole weight an all-gather brings, or "" of another message."""
    return _LAYER_OF.get(message.numel, "") if "gather" in message.collective else ""


def _whole(wrapped):
    return {name: x.detach().clone() for name, x in wrapped.gather_full_parameters().items()}


def _shards(wrap):
    yield from shared.starts_from_rank_0(
        wrap,
        "Broadcast before sharding; put together what is kept, in the order of ranks, without padding.",
        _uneven,
        _whole,
    )
    yield Property("gather_full_parameters() returns rank 0's values, whole, by name")

    wrapped = wrap(_Layers(seed=0))
    # By layer: a shard may have a name of its own.
    sizes = Counter()
    for name, parameter in wrapped.module.named_parameters():
        sizes[name.rpartition(".")[0]] += parameter.numel()
    for name, parameter in _Layers(seed=0).named_parameters():
        n = parameter.numel()
        has = sizes[name.rpartition(".")[0]]
        share = -(-n // dist.get_world_size())
        is_sharded = n in _LAYER_OF
        if is_sharded and has > share:
            yield f"{name!r} still has {has} of {n} elements. A rank keeps its rows, {share}."
        if not is_sharded and has != n:
            yield f"{name!r} was sharded. Leave what is in no Linear or Embedding whole on every rank."
    yield Property("of every Linear and Embedding weight a rank keeps its share")


def _forward(wrap):
    wrapped = wrap(_Layers(seed=0))
    tokens = tokens_of(dist.get_rank(), 0)
    early = []

    def before(layer, *_):
        for message in sent:
            if _gathered(message) == layer and not message.waited_for:
                early.append(layer)
                message.wait()  # or freeing its memory may crash

    for layer in LAYERS:
        getattr(wrapped.module, layer).register_forward_pre_hook(partial(before, layer))
    with torch.no_grad(), observed() as sent:
        outputs = wrapped(tokens)
    if early:
        yield f"{early[0]!r} computes while its weight may be on its way. wait() for its all-gather before."
    if not close(outputs, _Layers(seed=0)(tokens)):
        yield "its forward is not the module's. Does every layer compute with its own, whole weight?"
    with torch.no_grad():
        outputs = wrap(_uneven(0))(tokens)
    if not close(outputs, _uneven(0)(tokens)):
        yield "with 61 rows its forward is not the module's. Compute with the weight's own rows, no padding."
    yield Property("forward computes with the whole weights, and leaves the shards in place")

    wrapped = wrap(_Layers(seed=0), compute_dtype=_LOW)
    with torch.no_grad(), observed() as sent:
        wrapped(tokens)
    for message in sent:
        layer = _gathered(message)
        if layer and message.dtype != _LOW:
            yield f"{layer!r} is gathered in {message.dtype}. Cast the shard before it is sent."
    yield Property(f"{_IN_LOW}, weights are cast before they are gathered")


def _backward(wrap):
    yield from shared.gradients(
        wrap,
        " Does each rank get the rows of its shard, and does backward compute with the whole weights?",
        _uneven,
        _whole,
    )
    yield Property(
        "every .grad has its parameter's shape and dtype, and is the mean over the ranks"
    )

    how = "the weights follow one process that has the whole batch"
    yield from shared.follow(wrap, how, make=_Layers, weights=_whole)


def _has_memory(reference):
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage is not None and storage.nbytes() > 0


def _memory(wrap):
    wrapped = wrap(_Layers(seed=0))
    mistakes = []
    crowds = []
    # Of whole weights, and of the whole gradients of this step.
    seen = {name: [] for name in _MOST}
    reductions = seen["reduce_scatter"]
    still = "the whole weights of these layers still have memory:"

    def whole(collective, allowed=0):
        """The layers; cycles and Gloo's threads may free some within a second."""
        until = time.monotonic() + 1
        while True:
            alive = sorted({_LAYER_OF[x.numel] for x in seen[collective] if _has_memory(x.storage)})
            if len(alive) <= allowed or time.monotonic() > until:
                return alive
            gc.collect()
            time.sleep(0.01)

    def note(message):
        name = message.collective
        layer = _LAYER_OF.get(message.numel)
        if layer and name in ("all_reduce", "reduce"):
            mistakes.append(
                f"the whole gradient of {layer!r} went through {name}. Use reduce_scatter."
            )
        if layer and name in seen:
            if _gathered(message) and reductions and reductions[-1].waits:
                mistakes.append(
                    "backward waits for the gradient that left last. Wait when newer ones have left."
                )
            message.is_completed = message.wait
            seen[name].append(message)
            allowed, mend = _MOST[name]
            held = len(whole(name, allowed))
            if held > allowed:
                crowds.append(f"{held} whole {mend}")

    with observed(note):
        for step in range(2):
            wrapped.zero_grad()
            loss = loss_of(wrapped, dist.get_rank(), step)
            # Backward begins with the last.
            kept = whole("all_gather", allowed=1)
            if len(kept) > 1:
                mistakes.append(
                    f"after forward {still} {', '.join(kept)}. Autograd keeps them: free by "
                    "untyped_storage().resize_(0), gather into the same tensor again."
                )
            loss.backward()
            if len(reductions) < len(LAYERS) - 2:
                mistakes.append(
                    "gradients stay until backward is over. Reduce each when it is there."
                )
            wrapped.finish_gradient_synchronization()
            reductions.clear()
            kept = ", ".join(whole("all_gather"))
            if kept:
                mistakes.append(f"after backward {still} {kept}. Free each with its gradient.")
    yield from mistakes + crowds
    yield Property("gradients are reduce-scattered: no rank receives more than its share")
    yield Property(
        "whole weights are freed after use, in forward and in backward, and whole gradients too"
    )


def _prefetch(wrap):
    wrapped = wrap(_Layers(seed=0))
    mistakes = []
    # Of a pass: the layers that it has reached, and by layer how many they were when its all-gather started.
    reached = []
    begun = {}
    # Gathered for a layer that has not been reached yet.
    ahead = {}

    def on_message(message):
        layer = _gathered(message)
        if layer:
            # Who asks again and again waits, too.
            message.is_completed = message.wait
            begun.setdefault(layer, len(reached))
            ahead[layer] = message
            if not message.is_async:
                mistakes.append(
                    f"the all-gather of {layer!r} is waited for where it starts. Start it with async_op=True."
                )

    def enter(layer, *_):
        """Called before the wrapper's own hook."""
        reached.append(layer)

    def before_computing(layer, *_):
        """Called behind it."""
        ahead.pop(layer, None)
        for other, message in ahead.items():
            if message.waits:
                mistakes.append(
                    f"the all-gather of {other!r} is waited for before {layer!r} computes, hidden by "
                    "nothing. Before it, wait for its own gather alone."
                )

    def on_result(layer, module, inputs, result):
        result.register_hook(partial(enter, layer))
        result.register_hook(partial(before_computing, layer))

    for layer in LAYERS:
        module = getattr(wrapped.module, layer)
        module.register_forward_pre_hook(partial(enter, layer), prepend=True)
        module.register_forward_pre_hook(partial(before_computing, layer))
        module.register_forward_hook(partial(on_result, layer))
    # What is gathered when in backward is known from the first step on.
    for step in range(2):
        mistakes.clear()
        ahead.clear()
        wrapped.zero_grad()
        with observed(on_message):
            reached.clear()
            begun.clear()
            loss = loss_of(wrapped, dist.get_rank(), step)
            in_forward = begun.copy()
            reached.clear()
            begun.clear()
            loss.backward()
            wrapped.finish_gradient_synchronization()
    yield from mistakes
    for number, layer in enumerate(LAYERS):
        gather = f"the all-gather of {layer!r}"
        if layer not in in_forward:
            yield f"{gather} was not seen in forward. Start one, of torch.distributed."
        elif 0 < number < in_forward[layer]:
            yield f"{gather} starts only when its layer begins. Start it earlier, in forward's order."
        elif number > 2 and in_forward[layer] < number - 1:
            yield f"{gather} starts before the layer three before it is done; allowed: two layers ahead."
    # Backward begins with the last two. When it has reached the layer behind, the gather is late.
    for number, layer in enumerate(reversed(LAYERS)):
        if number > 1 and begun.get(layer, 0) >= number:
            yield f"in backward {layer!r} is gathered only when it is reached. Start it earlier, in reverse."
    yield Property("the all-gathers are under way before they are needed, at most two layers ahead")


def _precision(wrap):
    wrapped = wrap(_Layers(seed=0), compute_dtype=_LOW)
    one_step(wrapped)
    yield from shared.wrong_kinds(wrapped)
    for name, shard in wrapped.module.named_parameters():
        if shard.dtype != torch.float32:
            yield f"the shard of {name!r} is {shard.dtype}, not float32."
    yield ""  # SGD would raise
    before = _whole(wrapped)
    torch.optim.SGD(wrapped.parameters(), lr=1e-3).step()
    for name, x in _whole(wrapped).items():
        if x.numel() in _LAYER_OF and (x.equal(before[name]) or x.equal(x.to(_LOW).float())):
            yield f"{name!r} loses small updates: keep it in float32, cast a copy to gather."
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    tokens = tokens_of(dist.get_rank(), 0)
    with torch.no_grad():
        outputs = wrapped(tokens)
        from_new = functional_call(_Layers(0), _whole(wrapped), tokens)
        from_old = functional_call(_Layers(0), before, tokens)
    if (from_old - outputs).norm() < (from_new - outputs).norm():
        yield "forward computes with the weights from before the optimizer's step. Gather anew."
    yield Property(f"{_IN_LOW}, weights travel in it; shards, gradients and updates stay float32")


# In the order in which an FSDP is written.
GROUPS = {
    "shards": _shards,
    "forward": _forward,
    "backward": _backward,
    "memory": _memory,
    "prefetch": _prefetch,
    "precision": _precision,
}
