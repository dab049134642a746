"""The data-parallel wrappers against one process, and what each promises beyond that.

Each check is a promise, which its name says; `wrappers.run` runs it on every rank.
"""

import contextlib
import copy
import itertools
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
    bucket_bytes,
    fill_buckets,
    launch,
)
from cs336_systems.parallel.overlapped import RoundedDDP
from cs336_systems.traffic import watch_collectives

WRAPPERS = DDP | {
    "one bucket each": partial(BucketedDDP, bucket_size_mb=1e-6),
    "one bucket": partial(BucketedDDP, bucket_size_mb=100),
}


def every_property_of_the_checker(context):
    """At its most thorough; of one rank and of four, the two unlike most."""
    for name in WRAPPERS if context.world_size == 2 else ("flat", "some buckets"):
        passes(context, WRAPPERS[name], check_ddp, thorough=True)


def every_layout_starts_from_rank_0(context):
    for name, wrap in WRAPPERS.items():
        module = Odd(seed=context.rank)
        wrap(module)
        for key, expected in Odd(seed=0).state_dict().items():
            assert torch.equal(module.state_dict()[key], expected), (name, key)


def every_layout_gets_the_mean_gradient(context):
    """However the ranks lay gradients out."""
    scale = torch.arange(15.0).view(5, 3)
    mean = (context.world_size + 1) / 2
    for name, wrap in WRAPPERS.items():
        module = Odd()
        model = wrap(module)
        transposed = module.transposed
        scalar = module.scalar
        for _ in range(2):
            model.zero_grad()
            product = (transposed * scale).sum() * scalar
            (product * (context.rank + 1) + module.empty.sum()).backward()
            if name in ("naive", "flat") and context.rank == 0:
                transposed.grad = transposed.grad.contiguous()
            model.finish_gradient_synchronization()
            expected = mean * scale * scalar.detach()
            torch.testing.assert_close(transposed.grad, expected)
            expected = mean * (transposed.detach() * scale).sum()
            torch.testing.assert_close(scalar.grad, expected)


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


def buckets_follow_the_order_that_rank_0_has_seen(context):
    """They keep their size; gradients are views into one buffer, whichever way they are zeroed."""
    # The ranks see different orders.
    order = [2, 0, 3, 1] if context.rank == 0 else [1, 0, 2, 3]
    torch.manual_seed(0)
    module = OutOfOrder(order)
    alone = copy.deepcopy(module)
    model = BucketedDDP(module, bucket_size_mb=2 * LAYER_MB)
    assert model._buckets == [[3, 2], [1, 0]]
    for step in range(4):
        model.zero_grad(set_to_none=step < 2)
        alone.zero_grad()
        inputs = torch.randn(3, 8)
        alone(inputs).sum().backward()
        model(inputs).sum().backward()
        model.finish_gradient_synchronization()
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient, parameter in zip(gradients, alone.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(gradient, parameter.grad / context.world_size)
        buffers = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        assert len(buffers) == 1
        assert model._buckets == [[1, 3], [0, 2]]


def messages_are_as_long_as_bucket_bytes_says(context):
    """Padded: of 7 x 33 and 7 float32, 256 and 32."""
    model = BucketedDDP(nn.Linear(33, 7), bucket_size_mb=25)
    with watch_collectives() as messages:
        model(torch.randn(2, 33)).sum().backward()
    assert [message.bytes for message in messages] == [4 * 288]
    assert bucket_bytes(model.parameters(), 25) == [4 * 288]


def sent(model, *, communicates=True):
    """Bytes of the all-reduces of a step, while backward runs and after it."""
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


# Bytes of a weight, and of the flags at the end.
WEIGHT = 256
USED = 4


def messages_leave_while_backward_runs(context):
    weights = 4 * [WEIGHT]
    assert sent(NaiveDDP(OutOfOrder())) == ([], weights + [USED])
    assert sent(FlatDDP(OutOfOrder())) == ([], [4 * WEIGHT, USED])
    assert sent(OverlappedDDP(OutOfOrder())) == (weights, [USED])
    model = BucketedDDP(OutOfOrder(), bucket_size_mb=2 * LAYER_MB)
    buckets = 2 * [2 * WEIGHT]
    assert sent(model) == (buckets, [USED])
    assert sent(model, communicates=False) == ([], buckets + [USED])
    assert sent(model) == (buckets, [USED])


def a_rounded_mean_is_float32_again(context):
    """Of 1 and 1 + 2 ** -7 the mean lies between two numbers of bfloat16: the even one is taken."""
    module = nn.Linear(1, 1, bias=False)
    model = RoundedDDP(module, 2 * LAYER_MB, torch.bfloat16)
    with watch_collectives() as messages:
        model(torch.tensor([[1 + context.rank * 2**-7]])).backward()
    assert [message.dtype for message in messages] == [torch.bfloat16]
    model.finish_gradient_synchronization()
    assert module.weight.grad.dtype == torch.float32
    assert module.weight.grad.item() == 1.0


def a_backward_inside_of_backward_is_no_pass_of_its_own(context):
    """As a checkpoint of the old kind runs it."""
    nested = OverlappedDDP(Recomputed())
    assert sent(nested)[1] == sent(nested)[1] == [USED]


def passes_of_the_ranks_may_reach_different_layers(context):
    for name, wrap in WRAPPERS.items():
        module = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        model = wrap(module)
        # First in the order of the parameters, then in the order observed.
        for _ in range(2):
            model.zero_grad()
            reached = ((0, 0, 1), (0, 1, 2))[context.rank]
            for number in reached:
                module[number](torch.ones(1, 2)).sum().backward()
            model.finish_gradient_synchronization()
            means = [layer.weight.grad.mean().item() for layer in module]
            assert means == [1.5, 1, 0.5], name


EVERYWHERE = [
    every_property_of_the_checker,
    every_layout_starts_from_rank_0,
    every_layout_gets_the_mean_gradient,
]
TWO_RANKS = [
    messages_are_as_long_as_bucket_bytes_says,
    buckets_follow_the_order_that_rank_0_has_seen,
    messages_leave_while_backward_runs,
    a_rounded_mean_is_float32_again,
    a_backward_inside_of_backward_is_no_pass_of_its_own,
    passes_of_the_ranks_may_reach_different_layers,
]
GLOO = [("gloo", n) for n in (1, 2, 4)]
GPUS = [pytest.param("nccl", n, marks=pytest.mark.gpu(n)) for n in (1, 2, 4)]


@pytest.mark.parametrize(("backend", "ranks"), GLOO + GPUS)
def test_every_wrapper_keeps_its_promises(backend, ranks):
    launch(run, ranks, *EVERYWHERE, *TWO_RANKS * (ranks == 2), backend=backend, timeout_s=200)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
    st.integers(1, 200),
)
def test_every_tensor_is_in_one_bucket_and_a_bucket_keeps_its_limit(numbers, random, limit):
    tensors = [torch.empty(n, dtype=torch.bfloat16, device="meta") for n in numbers]
    order = random.sample(range(len(tensors)), len(tensors))
    buckets = fill_buckets(tensors, order, limit)
    # One dtype is filled in order.
    assert list(itertools.chain(*buckets)) == order
    for bucket in buckets:
        assert len(bucket) == 1 or sum(tensors[index].nbytes for index in bucket) <= limit
