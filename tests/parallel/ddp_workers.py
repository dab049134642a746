"""Workers for test_ddp.py. Each asserts on every rank what it says in its docstring."""

import contextlib
import gc
import re
import weakref
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.checks.ddp_checks import properties
from cs336_systems.checks.on_ranks import try_properties
from cs336_systems.measure.collective_calls import watch_collectives
from cs336_systems.parallel import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP, TorchDDP

WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "one bucket each": partial(BucketedDDP, bucket_size_mb=1e-6),
    "some buckets": partial(BucketedDDP, bucket_size_mb=4e-4),
    "one bucket": partial(BucketedDDP, bucket_size_mb=100),
}


def every_property_of_the_checker(context):
    """Every wrapper passes check_ddp at its most thorough; of one rank and of four, the two unlike most."""
    names = WRAPPERS if context.world_size == 2 else ("flat", "some buckets")
    for name, wrap in ((name, WRAPPERS[name]) for name in names):
        asked = cloudpickle.dumps((wrap, partial(properties, thorough=True)))
        assert try_properties(context, asked) == [], name


def odd_layouts(context):
    """Transposed weights, scalars, empty parameters, integer and boolean buffers."""
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(context.rank)
        module = nn.Module()
        module.transposed = nn.Parameter(torch.randn(3, 5).T)
        module.scalar = nn.Parameter(torch.randn(()))
        module.empty = nn.Parameter(torch.empty(0, 3))
        module.register_buffer("count", torch.tensor(context.rank))
        module.register_buffer("flags", torch.tensor([context.rank == 0, False]))
        module.register_buffer("transposed_too", torch.randn(2, 3).T)
        model = wrap(module)
        assert module.count == 0
        assert module.flags[0]
        for tensor in (*module.parameters(), module.transposed_too):
            total = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total)
            torch.testing.assert_close(total / context.world_size, tensor.detach(), msg=name)
        scale = torch.arange(15.0).view(5, 3)
        for _ in range(2):
            model.zero_grad()
            loss = (module.transposed * scale).sum() * (context.rank + 1) * module.scalar + module.empty.sum()
            loss.backward()
            if name in ("naive", "flat") and context.rank == 0:  # ranks may lay gradients out differently
                module.transposed.grad = module.transposed.grad.contiguous()
            model.finish_gradient_synchronization()
            mean = (context.world_size + 1) / 2
            weights = module.transposed.detach()
            torch.testing.assert_close(module.transposed.grad, mean * scale * module.scalar.detach())
            torch.testing.assert_close(module.scalar.grad, mean * (weights * scale).sum())


class OutOfOrder(nn.Module):
    """Runs its layers in an order of its own, which `order` says."""

    def __init__(self, order=(0, 1, 2, 3)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in order)
        self.order = order

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x).tanh()
        return x


class Recomputed(OutOfOrder):
    """Computes all layers but the first once more in backward, each in a backward of its own."""

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


LAYER_MB = 8 * 8 * 4 / 2**20


def buckets(context):
    """Buckets keep their size and follow the order seen by rank 0; the gradients are views into one buffer
    that hold the means, whichever way they are zeroed, and backward adds in place where it can."""
    order = [2, 0, 3, 1] if context.rank == 0 else [1, 0, 2, 3]  # the ranks see different orders
    torch.manual_seed(0)
    module = OutOfOrder(order)
    model = BucketedDDP(module, bucket_size_mb=2 * LAYER_MB)
    assert model._buckets == [[3, 2], [1, 0]]
    for step in range(4):
        model.zero_grad(set_to_none=step < 2)
        kept = [parameter.grad for parameter in model.parameters()]
        own = OutOfOrder(order)
        own.load_state_dict(module.state_dict())
        inputs = torch.randn(3, 8)
        own(inputs).sum().backward()
        model(inputs).sum().backward()
        model.finish_gradient_synchronization()
        for parameter, of_own, before in zip(module.parameters(), own.parameters(), kept, strict=True):
            mean = of_own.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(parameter.grad, mean / context.world_size)
            assert step < 3 or parameter.grad is before
        assert len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
        assert model._buckets == [[1, 3], [0, 2]]


def overlap(context):
    """What is sent while backward still runs, and that no_sync sends nothing."""

    def run(model, *, communicates=True):
        with watch_collectives() as messages:
            model.zero_grad()
            loss = model(torch.randn(3, 8)).sum()
            with contextlib.nullcontext() if communicates else model.no_sync():
                loss.backward()
            in_backward = len(messages)
            model.finish_gradient_synchronization()
        # At the end of the first step the order is broadcast, too.
        sizes = [message.bytes for message in messages if message.collective == "all_reduce"]
        return sizes[:in_backward], sizes[in_backward:]

    weight, used = 256, 4  # bytes
    assert run(NaiveDDP(OutOfOrder())) == ([], [*4 * [weight], used])
    assert run(FlatDDP(OutOfOrder())) == ([], [4 * weight, used])
    assert run(OverlappedDDP(OutOfOrder())) == (4 * [weight], [used])
    two_buckets = BucketedDDP(OutOfOrder(), bucket_size_mb=2 * LAYER_MB)
    assert run(two_buckets) == (2 * [2 * weight], [used])
    assert run(two_buckets, communicates=False) == ([], [2 * weight, 2 * weight, used])
    # An order that runs against the registration holds everything back, but only in the first step.
    backwards = OverlappedDDP(OutOfOrder(order=[3, 2, 1, 0]))
    sent = []
    third = backwards.module.layers[2].weight  # the third to be ready
    third.register_post_accumulate_grad_hook(lambda _: sent.append(len(backwards._pass.in_flight)))
    run(backwards)
    run(backwards)
    assert sent == [0, 3]
    # A checkpoint of the old kind runs a backward inside the backward: still one pass.
    nested = OverlappedDDP(Recomputed())
    assert run(nested)[1] == run(nested)[1] == [used]


def passes_apart(context):
    """The passes of the ranks reach different layers, and the means are right all the same."""
    for name, wrap in WRAPPERS.items():
        module = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        model = wrap(module)
        for _ in range(2):  # first in the order of the parameters, then in the order observed
            model.zero_grad()
            for number in ((0, 0, 1), (0, 1, 2))[context.rank]:
                module[number](torch.ones(1, 2)).sum().backward()
            model.finish_gradient_synchronization()
            assert [layer.weight.grad.mean().item() for layer in module] == [1.5, 1, 0.5], name


def disagreement(context):
    """Ranks that wrap different things all get an error, and the group still works."""
    first = context.rank == 0
    for make, words in (
        (lambda: NaiveDDP(nn.Linear(4, 4 + context.rank)), "weight (4, 4)"),
        (lambda: FlatDDP(nn.Linear(4, 4, bias=first)), "rank 1 has 'nothing'"),
        (lambda: NaiveDDP(nn.Linear(4, 4).requires_grad_(first)), "frozen"),
        (lambda: NaiveDDP(nn.BatchNorm1d(4) if first else nn.LayerNorm(4)), "'buffer running_mean (4,)"),
        (lambda: (NaiveDDP if first else FlatDDP)(nn.Linear(4, 4)), "'FlatDDP'"),
        (lambda: BucketedDDP(nn.Linear(4, 4), bucket_size_mb=1 + context.rank), "buckets of"),
        (lambda: NaiveDDP(nn.Linear(4, 4).requires_grad_(False)), "no trainable parameter"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            make()
    dist.barrier()


def refusals(context):
    """Sparse gradients and parameters unfrozen after wrapping are errors, not silence."""

    def train(model, inputs):
        model(inputs).sum().backward()
        model.finish_gradient_synchronization()

    for wrap in WRAPPERS.values():
        with pytest.raises(TypeError, match="sparse"):
            train(wrap(nn.Embedding(4, 2, sparse=True)), torch.tensor([1]))
        dist.barrier()
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    model = OverlappedDDP(layers)
    layers[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen when wrapped"):
        train(model, torch.ones(1, 2))


def garbage(context):
    """Deleting a wrapper and its module frees both, hooks and all; PyTorch's own too."""
    for name, wrap in (WRAPPERS | {"torch": partial(TorchDDP, bucket_size_mb=25)}).items():
        module = nn.Linear(2, 2)
        model = wrap(module)
        model(torch.ones(1, 2)).sum().backward()
        model.finish_gradient_synchronization()
        watched = [weakref.ref(thing) for thing in (model, module, module.weight)]
        del module, model
        gc.collect()
        assert not any(reference() for reference in watched), name


ANY_WORLD_SIZE = [every_property_of_the_checker, odd_layouts]
TWO_RANKS = [buckets, overlap, passes_apart, disagreement, refusals, garbage]


def run_all(context):
    """One launch for all of them: starting processes takes longer than the checks."""
    torch.set_default_device(context.device)
    for worker in ANY_WORLD_SIZE + TWO_RANKS * (context.world_size == 2):
        print(worker.__name__)
        worker(context)
