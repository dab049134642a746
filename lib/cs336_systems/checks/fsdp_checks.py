"""Properties of fully sharded data parallelism, with error messages for its author."""

import gc
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.arguments import check_choice
from cs336_systems.checks import ddp_checks as shared
from cs336_systems.checks.ddp_checks import VOCABULARY, loss_of, one_step, tokens_of
from cs336_systems.checks.on_ranks import (
    Property,
    checker_in_any_world,
    close,
    comes,
    observed,
    open_store,
)
from cs336_systems.model import Embedding, Linear, RMSNorm

# No two have as many elements, nor has one's share on 2, 3, 4 or 6 ranks, which identifies messages.
_SIZES = {
    "embedding": (VOCABULARY, 12),
    "up": (12, 60),
    "wide": (60, 84),
    "down": (84, 12),
    "head": (12, 132),
}
_LAYER_OF = {rows * columns: layer for layer, (rows, columns) in _SIZES.items()}
LAYERS = tuple(_SIZES)
_DEPTH = len(LAYERS)
# In which a step uses them, and the next one's forward.
_PATH = LAYERS + LAYERS[::-1] + LAYERS
# Of 61 rows ranks have no equal shares, so messages are padded.
_UNEVEN = _SIZES | {"up": (12, 61), "wide": (61, 84)}
_LOW = torch.bfloat16


@checker_in_any_world
def check_fsdp(wrap, *, only=()):
    """Try a sharding wrapper on a small model, in `world_size` CPU processes, against one process.

    It is called as `fsdp_class(module, compute_dtype=None, **options)` and needs `.module`, `forward`,
    `finish_gradient_synchronization()` and `gather_full_parameters()`; see `on_ranks.checker`.

    Args:
        only: the groups of properties to ask for, of GROUPS; () asks for all.
    """
    for group in only or GROUPS:
        check_choice("property", group, GROUPS)
        yield from GROUPS[group](wrap)


class _Layers(nn.Module):
    """Five layers and a norm, made in another order than they compute in."""

    def __init__(self, seed, sizes=_SIZES):
        torch.manual_seed(seed)
        super().__init__()
        for layer in sorted(sizes, key=len, reverse=True):
            kind = Embedding if layer == "embedding" else Linear
            self.add_module(layer, kind(*sizes[layer]))
        self.norm = RMSNorm(132)

    def forward(self, x):
        for layer in LAYERS:
            x = self.get_submodule(layer)(x).tanh()
        return self.norm(x)


_uneven = partial(_Layers, sizes=_UNEVEN)


def _gathered(message):
    """The layer whose whole weight an all-gather brings, or "" of another message."""
    return _LAYER_OF.get(message.numel, "") if "gather" in message.collective else ""


def _held(layers):
    """Of these those as large as whose whole weights tensors are that were made since gc.freeze()."""
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    # Of views, too, it is the memory that counts.
    storages = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes() // x.itemsize for x in tensors
    }
    return [layer for layer in map(_LAYER_OF.get, storages.values()) if layer in layers]


def _crowd(most, when, mend, layers=LAYERS):
    """What is wrong if there are more than `most` when cycles and Gloo's threads have freed theirs."""
    for _ in range(50):
        held = _held(layers)
        if len(held) <= most:
            return []
        gc.collect()
        time.sleep(0.01)
    return [f"{when} {', '.join(held)} still have whole tensors; allowed: {most}. {mend}"]


def _on_result(hook, module, inputs, result):
    """A forward hook: it is called when backward comes to the module."""
    result.register_hook(hook)


def _whole(wrapped):
    return {name: x.clone() for name, x in wrapped.gather_full_parameters().items()}


def _shards(wrap):
    yield from shared.starts_from_rank_0(
        wrap,
        "Broadcast before sharding; put together what is kept, in the order of ranks, without padding.",
        _uneven,
        _whole,
    )
    yield Property("gather_full_parameters() returns rank 0's values, whole, by name")

    gc.freeze()
    wrapped = wrap(_Layers(0))
    for layer, module in _Layers(0).named_children():
        n = module.weight.numel()
        # A shard may have a name of its own.
        has = sum(x.numel() for x in wrapped.module.get_submodule(layer).parameters())
        share = -(-n // dist.get_world_size())
        if layer == "norm" and has != n:
            yield "'norm.weight' was sharded. Leave what is in no Linear or Embedding whole on every rank."
        if layer != "norm" and has > share:
            yield f"'{layer}.weight' still has {has} of {n} elements. A rank keeps its rows, {share}."
    before = [(shard, shard.clone()) for shard in wrapped.parameters()]
    wrapped.gather_full_parameters()
    if dist.get_world_size() > 1:
        yield from _crowd(0, "after gather_full_parameters()", "Only return them.")
    for now, (shard, old) in zip(wrapped.parameters(), before, strict=True):
        if now is not shard or not torch.equal(now, old):
            yield "gather_full_parameters() changes what a rank keeps. Leave layers and shards as they are."
    yield Property("of every Linear and Embedding weight a rank keeps its share")


def _forward(wrap):
    wrapped = wrap(_Layers(0))
    tokens = tokens_of(dist.get_rank(), 0)
    early = []

    def before(layer, *_):
        for message in sent:
            if _gathered(message) == layer and not message.waited_for:
                early.append(layer)
                message.wait()  # or freeing its memory may crash

    for layer in LAYERS:
        wrapped.module.get_submodule(layer).register_forward_pre_hook(partial(before, layer))
    with torch.no_grad(), observed() as sent:
        wrapped(tokens)
        for shard in wrapped.parameters():
            shard.mul_(2)
        outputs = wrapped(tokens)
    wanted = torch.func.functional_call(_Layers(0), _whole(wrapped), tokens)
    if early:
        yield f"{early[0]!r} computes while its weight may be on its way. wait() for its all-gather before."
    if not close(outputs, wanted):
        yield "its second forward is not the module's. Does each layer compute with its weight as it is now?"
    yield Property("forward computes with the whole weights, and leaves the shards in place")

    if hasattr(wrapped, "collect"):
        yield from _collect(wrap)
    wrapped = wrap(_Layers(0), compute_dtype=_LOW)
    weights = _whole(wrapped)
    with torch.no_grad(), observed() as sent:
        wrapped(tokens)
    after = _whole(wrapped)
    for name, shard in wrapped.module.named_parameters():
        if shard.dtype != torch.float32:
            yield f"the shard of {name!r} is {shard.dtype}, not float32."
    for message in sent:
        layer = _LAYER_OF.get(message.numel)
        if layer and not _gathered(message):
            yield f"{layer!r} travels by {message.collective}. An all-gather sends rows alone."
        if layer and message.dtype != _LOW:
            yield f"{layer!r} is gathered in {message.dtype}. Cast the shard before it is sent."
    for name, x in after.items():
        if not torch.equal(x, weights[name]):
            yield f"{name!r} is no longer what it was. Send a copy that is cast, and leave the shard."
    yield Property(f"with compute_dtype={_LOW}, weights are cast before they are gathered")


def _collect(wrap):
    """Of a class that has it."""
    store = open_store()
    for asking in range(dist.get_world_size()):
        wrapped = wrap(_Layers(0))
        weights = wrapped.weights[:3]
        first, second, third = weights
        # As autograd keeps them.
        kept = [weight.whole.untyped_storage() for weight in weights]
        is_asking = dist.get_rank() == asking
        mistake = ""
        with observed() as sent:
            wrapped.collect(weights if is_asking else [first])
            asked = len(sent)
            if is_asking:
                store.set(f"{asking}", "")
            elif not comes(store, f"{asking}"):
                mistake = f"collect of rank {asking} waits for more than the first weight."
            wrapped.collect([second, first, third])
            wrapped.collect([third])
        if [x.numel for x in sent] != [
            x.whole.numel() for x in weights
        ] or asked != 1 + 2 * is_asking:
            mistake = (
                "collect does not start one all-gather of torch.distributed for each, in order."
            )
        if any(
            type(x) is Tensor and x is not first.all_rows and x.shape == first.shard.shape
            for x in vars(first).values()
        ):
            mistake = "collect keeps what was sent, when it has arrived. Drop it."
        if not all(x.nbytes() for x in kept):
            mistake = "a gather fills a new tensor. Resize all_rows' storage: autograd keeps that."
        yield mistake
    yield Property("collect asks for all, each once, and waits for the first alone")


def _backward(wrap):
    yield from shared.gradients(
        wrap,
        " Does each rank get the rows of its shard, and does backward compute with the whole weights?",
        _uneven,
        _whole,
    )
    wrapped = wrap(_Layers(0), compute_dtype=_LOW)
    one_step(wrapped)
    yield from shared.wrong_kinds(wrapped)
    yield Property(
        "every .grad has its parameter's shape and dtype, with compute_dtype, too, and is the mean over ranks"
    )

    yield from shared.follow(
        wrap, "the weights follow one process that has the whole batch", _Layers, _whole
    )


def _memory(wrap):
    if dist.get_world_size() == 1:
        return  # shares are whole
    gc.freeze()
    wrapped = wrap(_Layers(0))
    mistakes = []
    reductions = []

    def note(message):
        name = message.collective
        layer = _LAYER_OF.get(message.numel)
        if layer and name.endswith("reduce"):
            mistakes.append(
                f"the whole gradient of {layer!r} went through {name}. Use reduce_scatter."
            )
        if layer and reductions and reductions[-1].waits:
            mistakes.append(
                "backward waits for the gradient that left last. Wait when newer ones have left."
            )
        if layer and name == "reduce_scatter":
            reductions.append(message)

    def look(*_):
        """When the gradients of three layers have been made."""
        mistakes.extend(
            _crowd(
                2,
                "when three gradients are made,",
                "Free weight and gradient, keep only what is sent, and before one goes wait for all but one.",
                LAYERS[2:],
            )
        )

    wrapped.module.up.register_forward_hook(partial(_on_result, look))
    with observed(note):
        for step in range(2):
            wrapped.zero_grad()
            loss = loss_of(wrapped, dist.get_rank(), step)
            # Backward begins with the last.
            mistakes += _crowd(
                1,
                "after forward",
                "Autograd keeps a weight: free its untyped_storage().resize_(0), gather into it again.",
            )
            loss.backward()
            if len(reductions) < _DEPTH - 2:
                mistakes.append(
                    f"{len(reductions)} gradients leave in backward. Reduce-scatter each, by dist, at once."
                )
            wrapped.finish_gradient_synchronization()
            reductions.clear()
            mistakes += _crowd(0, "after backward", "Free each with its gradient.")
            yield "".join(mistakes[:1])
    yield Property(
        "gradients are reduce-scattered; whole ones, and weights in both passes, are freed"
    )


def _pace(wrap):
    store = open_store()
    for first in range(dist.get_world_size()):
        late, _ = _second_step(wrap, store, first)
        if late:
            yield (
                f"rank {first} is held up by others that are still at {late[0]!r}. Send with async_op=True, "
                "wait for a layer's own gather and for older gradients alone."
            )
        yield ""
    yield Property("no rank waits until the others have come as far")


def _second_step(wrap, store, first):
    """A step in which the others hold at each layer until one rank is further, which can do without them.

    Returns the layers where they hold in vain, and how many layers before a place in _PATH its gather starts.
    """
    wrapped = wrap(_Layers(0))
    one_step(wrapped)  # from then on the order is known
    wrapped.zero_grad()
    is_first = dist.get_rank() == first
    reached = []
    # The gathers for layers that have not been reached yet.
    ahead = {}
    leads = {}
    late = []

    def on_message(message):
        layer = _gathered(message)
        if layer:
            ahead[layer] = message
            here = max(len(reached) - 1, 0)
            place = _PATH.index(layer, here)
            leads.setdefault(place, place - here)

    def enter(layer, *_):
        """Called before the wrapper's own hook."""
        reached.append(layer)
        if is_first:
            store.set(f"{first} {len(reached)}", "")

    def before_computing(layer, *_):
        """Called behind it."""
        ahead.pop(layer, None)
        # In backward the first needs gradients of all.
        more = len(ahead) if len(reached) <= _DEPTH else bool(ahead)
        further = f"{first} {len(reached) + 1 + more}"
        if any(x.waits for x in ahead.values()) or not (is_first or late or comes(store, further)):
            late.append(layer)

    for layer in LAYERS:
        module = wrapped.module.get_submodule(layer)
        for call in (enter, before_computing):
            hook = partial(call, layer)
            module.register_forward_pre_hook(hook, prepend=call is enter)
            module.register_forward_hook(partial(_on_result, hook), prepend=call is enter)
    with observed(on_message):
        loss_of(wrapped, dist.get_rank()).backward()
        enter("")
        enter("")
        wrapped.finish_gradient_synchronization()
    return late, leads


def _prefetch(wrap):
    _, leads = _second_step(wrap, open_store(), dist.get_rank())
    for place, layer in enumerate(_PATH[: 2 * _DEPTH]):
        in_forward = place < _DEPTH
        gather = f"in {'forward' if in_forward else 'backward'} the all-gather of {layer!r}"
        lead = leads.get(place)
        if lead is None and in_forward:
            yield f"{gather} was not seen. Start one, of torch.distributed."
        if lead == 0 and place % _DEPTH:
            yield f"{gather} starts only when its layer begins. Start it earlier."
        if lead and lead > 2:
            yield f"{gather} starts before the layer three before it is done; allowed: two layers ahead."
    yield Property("the all-gathers are under way before they are needed, at most two layers ahead")


# In the order in which an FSDP is written.
GROUPS = {
    "shards": _shards,
    "forward": _forward,
    "backward": _backward,
    "memory": _memory,
    "pace": _pace,
    "prefetch": _prefetch,
}
