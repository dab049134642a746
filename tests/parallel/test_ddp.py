"""The data-parallel wrappers against one process, and what each promises beyond that.

Checks are run by `wrappers.run`; each asserts on every rank what it says in its docstring.
"""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from wrappers import DDP, Odd, passes, run

from cs336_systems.checks import check_ddp
from cs336_systems.parallel import (
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlappedDDP,
    fill_buckets,
    launch,
)
from cs336_systems.traffic import watch_collectives

WRAPPERS = DDP | {
    "one bucket each": partial(BucketedDDP, bucket_size_mb=1e-6),
    "one bucket": partial(BucketedDDP, bucket_size_mb=100),
}


def every_property_of_the_checker(context):
    """At its most thorough; of one rank and of four, the two unlike most."""
    for name in WRAPPERS if context.world_size == 2 else ("flat", "some buckets"):
        passes(context, WRAPPERS[name], check_ddp)


def odd_layouts(context):
    """Every layout starts from rank 0's and gets the mean gradient, however the ranks lay gradients out."""
    scale, mean = torch.arange(15.0).view(5, 3), (context.world_size + 1) / 2
    for name, wrap in WRAPPERS.items():
        module = Odd(seed=context.rank)
        model, wanted = wrap(module), Odd(seed=0).state_dict()
        assert all(torch.equal(wanted[key], found) for key, found in module.state_dict().items()), (
            name
        )
        for _ in range(2):
            model.zero_grad()
            loss = (module.transposed * scale).sum() * (
                context.rank + 1
            ) * module.scalar + module.empty.sum()
            loss.backward()
            if name in ("naive", "flat") and context.rank == 0:
                module.transposed.grad = module.transposed.grad.contiguous()
            model.finish_gradient_synchronization()
            weights = module.transposed.detach()
            torch.testing.assert_close(
                module.transposed.grad, mean * scale * module.scalar.detach()
            )
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
    module, alone = OutOfOrder(order), OutOfOrder(order)
    alone.load_state_dict(module.state_dict())
    model = BucketedDDP(module, bucket_size_mb=2 * LAYER_MB)
    assert model._buckets == [[3, 2], [1, 0]]
    for step in range(4):
        model.zero_grad(set_to_none=step < 2), alone.zero_grad()
        kept, inputs = [parameter.grad for parameter in model.parameters()], torch.randn(3, 8)
        for each in (alone, model):
            each(inputs).sum().backward()
        model.finish_gradient_synchronization()
        for parameter, own, before in zip(
            module.parameters(), alone.parameters(), kept, strict=True
        ):
            dist.all_reduce(own.grad)
            torch.testing.assert_close(parameter.grad, own.grad / context.world_size)
            assert step < 3 or parameter.grad is before
        assert (
            len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()})
            == 1
        )
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
    two_buckets = BucketedDDP(OutOfOrder(), bucket_size_mb=2 * LAYER_MB)
    assert run(NaiveDDP(OutOfOrder())) == ([], [*4 * [weight], used])
    assert run(FlatDDP(OutOfOrder())) == ([], [4 * weight, used])
    assert run(OverlappedDDP(OutOfOrder())) == (4 * [weight], [used])
    assert run(two_buckets) == (2 * [2 * weight], [used])
    assert run(two_buckets, communicates=False) == ([], [2 * weight, 2 * weight, used])
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


EVERYWHERE = [every_property_of_the_checker, odd_layouts]
TWO_RANKS = [buckets, overlap, passes_apart]


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("gloo", n) for n in (1, 2, 4)]
    + [pytest.param("nccl", n, marks=pytest.mark.gpu(n)) for n in (1, 2, 4)],
)
def test_every_wrapper_keeps_its_promises(backend, ranks):
    launch(run, ranks, *EVERYWHERE, *TWO_RANKS * (ranks == 2), backend=backend, timeout_s=200)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
    st.integers(1, 200),
)
def test_every_tensor_is_in_one_bucket_and_a_bucket_keeps_its_limit(numbers, random, limit):
    dtypes = [random.choice([torch.float32, torch.bfloat16]) for _ in numbers]
    tensors = [torch.empty(n, dtype=d, device="meta") for n, d in zip(numbers, dtypes, strict=True)]
    order = random.sample(range(len(tensors)), len(tensors))
    buckets = fill_buckets(tensors, order, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    position = {index: number for number, index in enumerate(order)}
    completed = [position[bucket[-1]] for bucket in buckets]
    assert completed == sorted(completed)
    for bucket in buckets:
        held = [tensors[index] for index in bucket]
        assert len({tensor.dtype for tensor in held}) == 1
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held) <= limit
        assert [position[index] for index in bucket] == sorted(position[index] for index in bucket)
