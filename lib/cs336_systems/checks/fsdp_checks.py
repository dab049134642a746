"""Properties of fully sharded data parallelism, with error messages for its author."""

import gc
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.arguments import check_choice
from cs336_systems.checks.ddp_checks import (
    VOCABULARY,
    follow,
    gradients,
    loss_of,
    one_step,
    starts_from_rank_0,
    tokens_of,
    wrong_kinds,
)
from cs336_systems.checks.on_ranks import (
    MEET,
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
_LOW = torch.bfloat16


@checker_in_any_world
def check_fsdp(wrap, *, only=()):
    """Try a sharding wrapper on a small model, in `world_size` CPU processes, against one process.

    It is called as `wrap(module, compute_dtype=None, **options)` and needs `.module`, `forward`,
    `finish_gradient_synchronization()` and `gather_full_parameters()`; see `on_ranks.checker`.

    Args:
        only: the groups of properties to ask for, of GROUPS; () asks for all.
    """
    for group in only or GROUPS:
        check_choice("property", group, GROUPS)
        for properties in GROUPS[group]:
            yield from properties(wrap)


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


# Of 61 rows ranks have no equal shares, so messages are padded.
_uneven = partial(_Layers, sizes=_SIZES | {"up": (12, 61), "wide": (61, 84)})


def _gathered(message):
    """The layer whose whole weight an all-gather brings; None of another message."""
    return _LAYER_OF.get(message.numel) if "gather" in message.collective else None


def _whole_layers(layers):
    """Those of which a tensor that was made since gc.freeze() is as large as the whole weight."""
    numbers = {}
    for x in gc.get_objects():
        if type(x) in (Tensor, nn.Parameter):
            # Of views, too, it is the memory that counts.
            storage = x.untyped_storage()
            numbers[storage._cdata] = storage.nbytes() // x.itemsize
    return [layer for layer in map(_LAYER_OF.get, numbers.values()) if layer in layers]


def _too_many_whole(most, when, mend, layers=LAYERS):
    """What is wrong if there are more than `most` when cycles and Gloo's threads have freed theirs."""
    for _ in range(50):
        whole = _whole_layers(layers)
        if len(whole) <= most:
            return
        gc.collect()
        time.sleep(0.01)
    yield f"{when} {', '.join(whole)} still have whole tensors; allowed: {most}. {mend}"


def _on_result(hook, module, inputs, result):
    """A forward hook: `hook` is called when backward comes to the module."""
    result.register_hook(hook)


def _whole(wrapped):
    return {name: x.clone() for name, x in wrapped.gather_full_parameters().items()}


def _starts_from_rank_0(wrap):
    yield from starts_from_rank_0(
        wrap,
        "Broadcast before sharding; put together what is kept, in the order of ranks, without padding.",
        _uneven,
        _whole,
    )
    yield Property("gather_full_parameters() returns rank 0's values, whole, by name")


def _keeps_its_share(wrap):
    gc.freeze()
    wrapped = wrap(_Layers(0))
    for layer, module in _Layers(0).named_children():
        n = module.weight.numel()
        # A shard may have a name of its own.
        has = sum(x.numel() for x in wrapped.module.get_submodule(layer).parameters())
        share = -(-n // dist.get_world_size())
        if layer != "norm":
            if has > share:
                yield f"'{layer}.weight' still has {has} of {n} elements. A rank keeps its rows, {share}."
        elif has != n:
            yield "'norm.weight' was sharded. Leave what is in no Linear or Embedding whole on every rank."
    before = {shard: shard.clone() for shard in wrapped.parameters()}
    wrapped.gather_full_parameters()
    if dist.get_world_size() > 1:
        yield from _too_many_whole(0, "after gather_full_parameters()", "Only return them.")
    for shard in wrapped.parameters():
        if shard not in before or not torch.equal(shard, before[shard]):
            yield "gather_full_parameters() changes what a rank keeps. Leave layers and shards as they are."
    yield Property("of every Linear and Embedding weight a rank keeps its share")


def _computes_with_whole_weights(wrap):
    wrapped = wrap(_Layers(0))
    tokens = tokens_of(dist.get_rank())
    early = []

    def before_computing(layer, *_):
        for message in sent:
            if _gathered(message) == layer and not message.waited_for:
                early.append(layer)
                message.wait()  # or freeing its memory may crash

    for layer in LAYERS:
        hook = partial(before_computing, layer)
        wrapped.module.get_submodule(layer).register_forward_pre_hook(hook)
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


def _collects(wrap):
    """Of a class that has `collect`, as the one that notebook 43 writes: it gathers some of its `weights`.

    Of a weight, `shard` has this rank's rows, `all_rows` those of all and padding, `whole` views them.
    """
    store = open_store()
    for asking in range(dist.get_world_size()):
        wrapped = wrap(_Layers(0))
        if not hasattr(wrapped, "collect"):
            return
        weights = first, second, third = wrapped.weights[:3]
        # As autograd keeps them.
        storages = [weight.whole.untyped_storage() for weight in weights]
        is_asking = dist.get_rank() == asking
        request = weights if is_asking else [first]
        with observed() as sent:
            wrapped.collect(request)
            started = len(sent)
            if is_asking:
                store.set(f"{asking}", "")
            waits = not comes(store, f"{asking}")
            wrapped.collect([second, first, third])
            wrapped.collect([third])
        if not all(x.nbytes() for x in storages):
            yield "a gather fills a new tensor. Resize all_rows' storage: autograd keeps that."
        # A copy of the shard is what was sent; the shard is a Parameter.
        tensors = [x for x in vars(first).values() if type(x) is Tensor and x is not first.all_rows]
        if first.shard.shape in [x.shape for x in tensors]:
            yield "collect keeps what was sent, when it has arrived. Drop it."
        sizes = [x.numel for x in sent]
        if sizes != [x.whole.numel() for x in weights] or started != len(request):
            yield "collect does not start one all-gather of torch.distributed for each, in order."
        if waits:
            yield f"collect of rank {asking} waits for more than the first weight."
        yield MEET
    yield Property("collect asks for all, each once, and waits for the first alone")


def _casts_before_gathering(wrap):
    wrapped = wrap(_Layers(0), compute_dtype=_LOW)
    weights = _whole(wrapped)
    with torch.no_grad(), observed() as sent:
        wrapped(tokens_of(dist.get_rank()))
    after = _whole(wrapped)
    for name, shard in wrapped.module.named_parameters():
        if shard.dtype != torch.float32:
            yield f"the shard of {name!r} is {shard.dtype}, not float32."
    for message in sent:
        if layer := _LAYER_OF.get(message.numel):
            if not _gathered(message):
                yield f"{layer!r} travels by {message.collective}. An all-gather sends rows alone."
            if message.dtype != _LOW:
                yield f"{layer!r} is gathered in {message.dtype}. Cast the shard before it is sent."
    for name, x in after.items():
        if not torch.equal(x, weights[name]):
            yield f"{name!r} is no longer what it was. Send a copy that is cast, and leave the shard."
    yield Property(f"with compute_dtype={_LOW}, weights are cast before they are gathered")


def _averages_gradients(wrap):
    yield from gradients(
        wrap,
        " Does each rank get the rows of its shard, and does backward compute with the whole weights?",
        _uneven,
        _whole,
    )
    wrapped = wrap(_Layers(0), compute_dtype=_LOW)
    one_step(wrapped)
    yield from wrong_kinds(wrapped)
    yield Property(
        "every .grad has its parameter's shape and dtype, with compute_dtype, too, and is the mean over ranks"
    )


_trains = partial(
    follow,
    how="the weights follow one process that has the whole batch",
    make=_Layers,
    weights=_whole,
)


def _frees(wrap):
    if dist.get_world_size() == 1:
        return  # shares are whole
    gc.freeze()
    wrapped = wrap(_Layers(0))
    mistakes = []

    def when_three_are_made(gradient):
        mistakes.extend(
            _too_many_whole(
                2,
                "when three gradients are made,",
                "Free weight and gradient, keep only what is sent, and before one goes wait for all but one.",
                LAYERS[2:],
            )
        )

    wrapped.module.up.register_forward_hook(partial(_on_result, when_three_are_made))
    for step in range(2):
        _check_step(wrapped, step, mistakes)
        yield mistakes[0] if mistakes else MEET
    yield Property(
        "gradients are reduce-scattered; whole ones, and weights in both passes, are freed"
    )


def _check_step(wrapped, step, mistakes):
    """Add how gradients are reduced, if wrongly, and what is whole after forward or backward."""
    reductions = []

    def note(message):
        if message.numel in _LAYER_OF:
            mistakes.extend(_reduction_mistakes(message, reductions))
            if message.collective == "reduce_scatter":
                reductions.append(message)

    with observed(note):
        wrapped.zero_grad()
        loss = loss_of(wrapped, dist.get_rank(), step)
        # Backward begins with the last.
        mistakes += _too_many_whole(
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
        mistakes += _too_many_whole(0, "after backward", "Free each with its gradient.")


def _reduction_mistakes(message, reductions):
    """Of a message as large as a layer; reductions: of the gradients that have left before it."""
    if message.collective.endswith("reduce"):
        layer = _LAYER_OF[message.numel]
        yield f"the whole gradient of {layer!r} went through {message.collective}. Use reduce_scatter."
    if reductions and reductions[-1].waits:
        yield "backward waits for the gradient that left last. Wait when newer ones have left."


def _second_step(wrap, note, enter, compute=lambda *_: None):
    """A step in which a wrapper knows the order of layers.

    Called are `enter` with each layer that a pass comes to, before the wrapper's own hooks, `compute` behind
    them, and `note` with each message.
    """
    wrapped = wrap(_Layers(0))
    one_step(wrapped)
    wrapped.zero_grad()
    for layer in LAYERS:
        module = wrapped.module.get_submodule(layer)
        for call, prepend in ((enter, True), (compute, False)):
            hook = partial(call, layer)
            module.register_forward_pre_hook(hook, prepend=prepend)
            module.register_forward_hook(partial(_on_result, hook), prepend=prepend)
    with observed(note):
        loss_of(wrapped, dist.get_rank()).backward()
        # As if there were two more layers: at the last ones, too, somebody may hold until one is further.
        enter("")
        enter("")
        wrapped.finish_gradient_synchronization()


def _keeps_pace(wrap):
    store = open_store()
    for first in range(dist.get_world_size()):
        late = _late_layers(wrap, store, first)
        if late:
            yield (
                f"rank {first} is held up by others that are still at {late[0]!r}. Send with async_op=True, "
                "wait for a layer's own gather and for older gradients alone."
            )
        yield MEET
    yield Property("no rank waits until the others have come as far")


def _late_layers(wrap, store, first):
    """Where the others hold in vain until the first rank, which can do without them, is further."""
    is_first = dist.get_rank() == first
    reached = []
    # The gathers for layers that have not been reached yet.
    ahead = {}
    late = []

    def note(message):
        if layer := _gathered(message):
            ahead[layer] = message

    def enter(layer, *_):
        if is_first:
            store.set(f"{first} {len(reached)}", "")
        reached.append(layer)

    def compute(layer, *_):
        ahead.pop(layer, None)
        lead = len(ahead)
        if len(reached) > _DEPTH:
            # In backward the first needs gradients of all.
            lead = min(lead, 1)
        waits = any(gather.waits for gather in ahead.values())
        # The first never does, and nobody twice.
        holds = not is_first and not late
        # All gathers that the first needs for this layer and `lead` more have started: it comes to the next.
        further = len(reached) + lead
        if waits or (holds and not comes(store, f"{first} {further}")):
            late.append(layer)

    _second_step(wrap, note, enter, compute)
    return late


def _prefetches(wrap):
    reached = []
    # By place in _PATH: how many layers before it its gather starts.
    leads = {}

    def note(message):
        if layer := _gathered(message):
            here = max(len(reached) - 1, 0)
            place = _PATH.index(layer, here)
            leads.setdefault(place, place - here)

    _second_step(wrap, note, lambda layer, *_: reached.append(layer))
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
    "shards": (_starts_from_rank_0, _keeps_its_share),
    "forward": (_computes_with_whole_weights, _collects, _casts_before_gathering),
    "backward": (_averages_gradients, _trains),
    "memory": (_frees,),
    "pace": (_keeps_pace,),
    "prefetch": (_prefetches,),
}
