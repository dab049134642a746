"""What correct fully sharded data parallelism does, said in sentences to whoever wrote it."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from cs336_systems.checks.on_ranks import Case, check_on_ranks, observed
from cs336_systems.model import Embedding, Linear, RMSNorm
from cs336_systems.names import check_choice
from cs336_systems.parallel import WorkerContext

Wrap = Callable[..., nn.Module]
ENDING = "finish_gradient_synchronization()"
_STEPS = 4
_SHARE = 3  # samples of one rank in one backward pass
_VOCABULARY = 24
_ALLOWED = 4  # whole weights at once: the one in use, two ahead of it, and the one before, about to be freed


def check_fsdp(
    fsdp_class: type[nn.Module],
    *,
    only: Sequence[str] = (),
    world_size: int = 2,
    thorough: bool = False,
    timeout_s: float = 60.0,
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
    name = getattr(fsdp_class, "__name__", repr(fsdp_class))
    candidate = partial(fsdp_class, **wrapper_arguments)
    check_on_ranks(name, candidate, cases(only, thorough), ENDING, world_size, timeout_s)


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


def _names_by_size() -> dict[int, str]:
    """Names of the toy's parameters, by their number of elements."""
    return {parameter.numel(): name for name, parameter in _Toy(seed=0).named_parameters()}


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
    tokens = _tokens(context.rank, 0)
    try:
        with _waiting_checked(wrapped.module):
            outputs = wrapped(tokens)
    except _NotWaitedForError as error:
        return str(error)
    if sizes != [parameter.numel() for parameter in wrapped.parameters()]:
        return "after forward, parameters() are not the shards any more. Put them back behind each layer."
    expected = alone(tokens)
    if outputs.shape != expected.shape or not _close(outputs, expected):
        return "its forward is not the module's. Does every layer compute with its own, whole weight?"
    return None


class _NotWaitedForError(Exception):
    """A layer begins to compute while its weight may still be on its way."""


@contextlib.contextmanager
def _waiting_checked(module: nn.Module) -> Iterator[None]:
    """Have each layer see, before it computes, whether anybody waited for its gather."""
    names = _names_by_size()
    handles: dict[str, Any] = {}

    def on_message(name: str, args: tuple, kwargs: dict, work: Any) -> None:
        if "gather" in name:
            handles[names.get(_largest(args, kwargs).numel(), "")] = work

    def compute(layer: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        work = handles.get(f"{layer}.weight")
        if work is not None and not work.waited_for:
            work.wait()  # or freeing its memory may crash
            raise _NotWaitedForError(
                f"{layer!r} computes while its weight may still be on its way. wait() for the handle of its "
                "all-gather before the layer begins."
            )
        return forward(x)

    for layer in LAYERS:
        part = getattr(module, layer)
        part.forward = partial(compute, layer, part.forward)
    with observed(on_message):
        yield


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
    if any(_together(context, problem)):
        return problem
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    after = _whole(wrapped)
    # With a learning rate of 1 the update is the gradient, however the ranks share it.
    for (name, parameter), mine in zip(total.named_parameters(), own.parameters(), strict=True):
        update, mean = before[name] - after[name], parameter.grad / context.world_size
        if _close(update, mean):
            continue
        if _close(update, parameter.grad):
            return f"the gradient of {name!r} is the sum over the ranks. Divide it by the world size."
        if _close(update, mean / context.world_size):
            return f"the gradient of {name!r} is averaged twice. Divide it by the world size once."
        if _close(update, torch.zeros_like(update)):
            return f"a step of SGD does not change {name!r}. Optimizers update parameters(), by their .grad."
        if _close(update, mine.grad):
            return f"the gradient of {name!r} is still this rank's own. Average it over the ranks."
        return (
            f"the gradient of {name!r} is not the mean over the ranks. Does each rank get the rows that "
            "belong to its shard, and does backward compute with the whole weights?"
        )
    return None


def _of_wrong_kind(wrapped: nn.Module) -> str | None:
    for name, parameter in wrapped.module.named_parameters():
        if parameter.grad is None:
            return f"{name!r} has no gradient after {ENDING}."
        if parameter.grad.shape != parameter.shape:
            return (
                f"the gradient of {name!r} has shape {tuple(parameter.grad.shape)} and its shard "
                f"{tuple(parameter.shape)}. Reduce-scatter it: each rank keeps the rows of its shard."
            )
        if parameter.grad.dtype != parameter.dtype:
            return (
                f"the gradient of {name!r} is {parameter.grad.dtype} and its shard {parameter.dtype}. "
                "Cast it after the reduce-scatter."
            )
    return None


def _trains(context: WorkerContext, wrap: Wrap) -> str | None:
    """the weights follow one process that has the whole batch, with SGD and with AdamW"""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for make in (sgd, partial(torch.optim.AdamW, lr=0.01, eps=1e-4)):
        alone, wrapped = _Toy(seed=0), wrap(_Toy(seed=0))
        optimizers = make(alone.parameters()), make(wrapped.parameters())
        now: dict[str, Tensor] = {}
        for step in range(_STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for rank in range(context.world_size):
                (_loss(alone, rank, step) / context.world_size).backward()
            older, now = now, _whole(wrapped)
            loss = _loss(wrapped, context.rank, step)
            problem = _stale(loss, context, step, now, older) if step else None
            loss.backward()
            wrapped.finish_gradient_synchronization()
            for optimizer in optimizers:
                optimizer.step()
            when = f"with {type(optimizers[0]).__name__}: after {step + 1} steps"
            problem = problem or _difference(alone, _whole(wrapped), when)
            if any(_together(context, problem)):
                return problem
    return None


def _stale(
    loss: Tensor, context: WorkerContext, step: int, now: dict[str, Tensor], older: dict[str, Tensor]
) -> str | None:
    """Whether a loss is that of the weights before the last step, and not that of those after it."""
    probe = _Toy(seed=0)
    with torch.no_grad():
        probe.load_state_dict(now)
        if _close(loss, _loss(probe, context.rank, step)):
            return None
        for name in now:
            probe.load_state_dict(now | {name: older[name]})
            if _close(loss, _loss(probe, context.rank, step)):
                return (
                    f"forward computes with {name!r} as it was before the optimizer's step. Gather anew what "
                    "was gathered before it, from the shard as it is now."
                )
        probe.load_state_dict(now | {name: older[name] for name in now if name.split(".")[0] in LAYERS})
        if _close(loss, _loss(probe, context.rank, step)):
            return (
                "forward computes with the weights from before the optimizer's step. Gather from the shards "
                "as they are now, in every forward."
            )
    return None


def _difference(alone: nn.Module, whole: dict[str, Tensor], when: str) -> str | None:
    for name, expected in alone.named_parameters():
        if not _close(whole[name], expected):
            error = (whole[name] - expected).abs().max().item()
            return (
                f"{when} {name!r} is {error:.1e} off the weights that one process gets from the whole batch."
            )
    return None


class _Held:
    """The whole weights that have memory: those that were gathered, and those that autograd keeps."""

    def __init__(self) -> None:
        self.sizes = _names_by_size()
        self.seen: dict[int, tuple[str, StorageWeakRef]] = {}
        self.most = 0

    def note(self, tensor: Tensor) -> Tensor:
        name = self.sizes.get(tensor.numel(), "")
        if name.removesuffix(".weight") in LAYERS:
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = name, StorageWeakRef(storage)
        if len(self.names()) > max(self.most, _ALLOWED):
            gc.collect()  # what only a cycle of Python's keeps is no fault
        self.most = max(self.most, len(self.names()))
        return tensor

    def on_message(self, name: str, args: tuple, kwargs: dict, _: Any) -> None:
        if "gather" in name:
            self.note(_largest(args, kwargs))

    def names(self) -> list[str]:
        """Of the weights that have memory now."""
        alive = []
        for name, reference in self.seen.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes() > 0:
                alive.append(name)
        return sorted(set(alive))


def _largest(args: tuple, kwargs: dict) -> Tensor:
    """The largest buffer of a message; of a list of them, one that stands for all together."""
    buffers = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            buffers.append(value)
        elif isinstance(value, list) and value:
            buffers.append(torch.empty(sum(part.numel() for part in value), dtype=value[0].dtype))
    return max(buffers, key=Tensor.numel)


def _frees(context: WorkerContext, wrap: Wrap) -> str | None:
    """whole weights are freed after use, in forward and in backward"""
    wrapped, held, problem = wrap(_Toy(seed=0)), _Held(), None
    with observed(held.on_message), torch.autograd.graph.saved_tensors_hooks(held.note, lambda kept: kept):
        for step in range(2):
            loss = _loss(wrapped, context.rank, step)
            gc.collect()
            kept = held.names()
            if len(kept) > 1:  # backward begins with the last
                problem = problem or (
                    f"after forward these whole weights still have memory: {', '.join(kept)}. Autograd keeps "
                    "what the layers computed with: free its storage, tensor.untyped_storage().resize_(0), "
                    "and gather into the same tensor for backward."
                )
            loss.backward()
            wrapped.finish_gradient_synchronization()
            gc.collect()
            if kept := held.names():
                problem = problem or (
                    f"after backward these whole weights still have memory: {', '.join(kept)}. Free each "
                    "once its gradient is there."
                )
    if held.most > _ALLOWED and not problem:
        return f"{held.most} whole weights have memory at once; allowed: the one in use and two ahead of it."
    return problem


def _reduces(context: WorkerContext, wrap: Wrap) -> str | None:
    """gradients are reduce-scattered: nobody receives more than its share"""
    wrapped, messages = wrap(_Toy(seed=0)), []
    with observed(lambda name, args, kwargs, _: messages.append((name, _largest(args, kwargs).numel()))):
        _loss(wrapped, context.rank, 0).backward()
        wrapped.finish_gradient_synchronization()
    names = _names_by_size()
    for name, numel in messages:
        if name in ("all_reduce", "reduce") and names.get(numel, "").removesuffix(".weight") in LAYERS:
            return (
                f"the whole gradient of {names[numel]!r} went through {name}, which sends twice as much as "
                "needed and holds it whole. Use reduce_scatter."
            )
    return None


def _ahead(context: WorkerContext, wrap: Wrap) -> str | None:
    """the all-gathers are under way before they are needed, at most two layers ahead"""
    module = _Toy(seed=0)
    wrapped, events = wrap(module), module.events
    names = {size: name.removesuffix(".weight") for size, name in _names_by_size().items()}

    def on_message(name: str, args: tuple, kwargs: dict, _: Any) -> None:
        if "gather" in name and (layer := names.get(_largest(args, kwargs).numel(), "")) in LAYERS:
            events.append(("gather" if kwargs.get("async_op") else "wait", layer))

    for step in range(2):
        events.clear()
        with observed(on_message):
            _loss(wrapped, context.rank, step).backward()
            events.append(("over", ""))
            wrapped.finish_gradient_synchronization()
    turn = next(i for i, event in enumerate(events) if event[0] == "back")
    forward, backward = events[:turn], events[turn:]
    for layer in LAYERS:
        if ("wait", layer) in events:
            return (
                f"the all-gather of {layer!r} is waited for where it starts, so nothing hides it. Start it "
                "with async_op=True, ahead of use, and wait for it when its layer begins."
            )
    for number, layer in enumerate(LAYERS):
        if ("gather", layer) not in forward:
            return f"forward does not gather {layer!r}; the weight that it computes with may be stale."
        start = forward.index(("gather", layer))
        if number > 0 and start > forward.index(("enter", layer)):
            return (
                f"the all-gather of {layer!r} starts only when its layer begins, so nothing hides it. Note "
                "the layers' order in the first forward, and from then on start it one or two layers earlier."
            )
        if number > 2 and start < forward.index(("enter", LAYERS[number - 2])):
            return (
                f"{layer!r} is gathered before the layer three before it is done; allowed: two layers ahead, "
                "or the memory that sharding saves is spent again."
            )
    for number, layer in enumerate(LAYERS[:-2]):
        if ("gather", layer) in backward and backward.index(("gather", layer)) > backward.index(
            ("back", LAYERS[number + 1])
        ):
            return (
                f"in backward the all-gather of {layer!r} starts only when its layer is reached. Start it "
                "one or two layers earlier, in the reverse of forward's order."
            )
    return None


def _low_precision(context: WorkerContext, wrap: Wrap) -> str | None:
    """with compute_dtype=torch.bfloat16, weights travel in it; shards, gradients and updates stay float32"""
    wrapped, low = wrap(_Toy(seed=0), compute_dtype=torch.bfloat16), torch.bfloat16
    dtypes = {}
    names = _names_by_size()

    def on_message(name: str, args: tuple, kwargs: dict, _: Any) -> None:
        if "gather" in name:
            buffer = _largest(args, kwargs)
            dtypes.setdefault(names.get(buffer.numel(), ""), buffer.dtype)

    with observed(on_message):
        outputs = wrapped(_tokens(context.rank, 0))
        F.cross_entropy(outputs.float(), _tokens(context.rank, 0)).backward()
        wrapped.finish_gradient_synchronization()
    problem = _of_wrong_kind(wrapped)
    for layer in LAYERS:
        if dtypes.get(f"{layer}.weight", low) != low:
            problem = problem or (
                f"with compute_dtype={low}, {layer!r} is gathered in {dtypes[f'{layer}.weight']}. Cast the "
                "shard before it is sent: that halves the bytes."
            )
    if outputs.dtype != low:
        problem = problem or f"with compute_dtype={low}, the layers compute in {outputs.dtype}."
    for name, parameter in wrapped.module.named_parameters():
        if parameter.dtype != torch.float32:
            problem = (
                problem
                or f"with compute_dtype={low}, the shard of {name!r} is {parameter.dtype}, not float32."
            )
    if any(_together(context, problem)):
        return problem
    before = _whole(wrapped)
    torch.optim.SGD(wrapped.parameters(), lr=1e-3).step()
    after = _whole(wrapped)
    for layer in LAYERS:
        weight = after[f"{layer}.weight"]
        if torch.equal(before[f"{layer}.weight"], weight) or torch.equal(weight, weight.to(low).float()):
            return (
                f"the weight of {layer!r} is kept in {low}, where small updates are lost. Keep the shard in "
                "float32 and cast a copy for each gather."
            )
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    with torch.no_grad():
        outputs, probe, errors = wrapped(_tokens(context.rank, 0)).float(), _Toy(seed=0), []
        for weights in (_whole(wrapped), after):
            probe.load_state_dict(weights)
            errors.append((probe(_tokens(context.rank, 0)) - outputs).norm())
    if errors[0] > errors[1]:
        return (
            f"with compute_dtype={low}, forward computes with the weights from before the optimizer's step. "
            "Cast the shard anew for every gather."
        )
    return None


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
    return _accumulated(context, wrap, _Odd, passes=1, silent=0)


def _several_passes(context: WorkerContext, wrap: Wrap) -> str | None:
    """three backward passes before finish_gradient_synchronization()"""
    return _accumulated(context, wrap, _Toy, passes=3, silent=0)


def _accumulates(context: WorkerContext, wrap: Wrap) -> str | None:
    """two backward passes under no_sync(), then one that communicates"""
    return _accumulated(context, wrap, _Toy, passes=3, silent=2)


def _accumulated(
    context: WorkerContext, wrap: Wrap, make: Callable[[int], nn.Module], passes: int, silent: int
) -> str | None:
    """Train with several passes a step, the first `silent` of them under no_sync()."""
    alone, wrapped, difference = make(0), wrap(make(context.rank)), None
    if silent and not hasattr(wrapped, "no_sync"):
        return "it has no no_sync() context, under which backward passes only accumulate."
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (alone, wrapped)]
    for step in range(_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(passes):
            for rank in range(context.world_size):
                (_loss(alone, rank, step + 100 * number) / context.world_size).backward()
            with wrapped.no_sync() if number < silent else contextlib.nullcontext():
                _loss(wrapped, context.rank, step + 100 * number).backward()
        wrapped.finish_gradient_synchronization()
        for optimizer in optimizers:
            optimizer.step()
        when = f"with {passes} passes a step, {silent} of them under no_sync(): after {step + 1} steps"
        difference = difference or _difference(alone, _whole(wrapped), when if passes > 1 else "odd shapes:")
    return difference


def _together(context: WorkerContext, problem: str | None) -> list[str | None]:
    """What every rank found, so that all go on or none does."""
    found: list[str | None] = [None] * context.world_size
    dist.all_gather_object(found, problem)
    return found


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


# What can be asked for, in the order in which an FSDP is written.
PROPERTIES: dict[str, tuple[Case, ...]] = {
    "shards": (_starts_from_rank_0, _keeps_shards),
    "forward": (_forward,),
    "backward": (_gradients, _reduces, _trains),
    "memory": (_frees,),
    "prefetch": (_ahead,),
    "precision": (_low_precision,),
}
