"""The sharded optimizer against the optimizer that it shards.

Each check is a promise, which its name says; `wrappers.run` runs it on every rank.
"""

import copy
import itertools
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW
from torch.optim.lr_scheduler import StepLR
from wrappers import Odd, passes, run, same_weights

from cs336_systems.checks import check_sharded_optimizer
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import (
    BucketedDDP,
    ShardedOptimizer,
    launch,
    partition_tensors,
    segment_bytes,
)
from cs336_systems.traffic import watch_collectives

SMALL_MB = 1e-3  # buckets of about two matrices
MATRICES = 6
WIDTH = 8


class Mixed(Odd):
    """And matrices, vectors, two dtypes, and parameters without a gradient."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH + n) for n in range(MATRICES))
        self.vectors = nn.ParameterList(torch.randn(WIDTH) for _ in range(MATRICES))
        self.short = nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16())
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def groups(self):
        """The first has only one parameter."""
        first, *vectors = self.vectors
        others = [self.transposed, self.short, self.frozen, self.unused]
        return [
            {"params": [first]},
            {"params": list(self.matrices) + others, "weight_decay": 0.1},
            {"params": vectors + [self.scalar, self.empty], "lr": 0.03},
        ]


def set_gradients(module, step):
    """The same on every rank, as data parallelism leaves them."""
    generator = torch.Generator("cpu").manual_seed(step)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, device="cpu")
        # Adafactor divides by the size.
        if name not in ("frozen", "unused", "empty"):
            parameter.grad = torch.empty_like(parameter).copy_(values)


def assert_same(module, reference, what=None):
    for name, expected in reference.named_parameters():
        parameter = module.get_parameter(name)
        assert torch.equal(parameter, expected), (what, name)
        assert parameter.stride() == expected.stride(), (what, name)


class Counts(SGD):
    """Keeps count of its steps in the settings of a group, and lets the count decide the step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])


OPTIMIZERS = [
    (AdamW, {"amsgrad": True}),
    (Adagrad, {"initial_accumulator_value": 0.5}),
    (Adafactor, {}),
    (Counts, {"lr": 0.1}),
]


def settings_of(optimizer):
    return [group | {"params": None} for group in optimizer.param_groups]


def weights_are_bitwise_those_of_the_whole_optimizer(context):
    """Whatever the class, the groups and the schedule.

    A rank that updates nothing has the settings of the groups all the same.
    """
    sizes = ((SMALL_MB, 3), (1, 1))
    for (kind, settings), (size_mb, groups) in itertools.product(OPTIMIZERS, sizes):
        alone = Mixed()
        module = Mixed()
        whole = kind(alone.groups()[:groups], **settings)
        sharded = ShardedOptimizer(
            module.groups()[:groups], kind, bucket_size_mb=size_mb, **settings
        )
        assert (len(sharded._buckets) > 3) == (size_mb == SMALL_MB)
        pairs = ((alone, whole), (module, sharded))
        schedulers = [StepLR(optimizer, 2) for _, optimizer in pairs]
        for step in range(4):
            for (model, optimizer), scheduler in zip(pairs, schedulers, strict=True):
                set_gradients(model, step)
                optimizer.step()
                scheduler.step()
            assert_same(module, alone, (kind, step))
        assert all(sharded._owners[parameter] == context.rank for parameter in sharded.state)
        assert settings_of(sharded) == settings_of(whole)


def every_property_of_the_checker(context):
    """In one bucket and in several."""
    for size in (SMALL_MB, 100):
        passes(context, partial(ShardedOptimizer, bucket_size_mb=size), check_sharded_optimizer)


def a_bucket_leaves_before_the_next_one_is_updated(context):
    """And no bucket is larger than asked."""
    module = Mixed()
    events = []

    class Logged(SGD):
        def step(self, closure=None):
            events.append("update")
            return super().step(closure)

    limit_mb = 5e-4 * context.world_size
    optimizer = ShardedOptimizer(module.matrices, Logged, lr=0.1, bucket_size_mb=limit_mb)
    set_gradients(module, 0)
    with watch_collectives(notify=lambda message: events.append(message.bytes)):
        optimizer.step()
    assert events[::2] == ["update"] * len(optimizer._buckets)
    assert len(events) >= 4
    assert max(events[1::2]) <= limit_mb * 2**20


class PartlyUsed(nn.Module):
    """Of three layers the last is not used; a frozen bias, a transposed weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.unused = nn.Linear(2, 2)
        self.layers[0].bias.requires_grad_(False)
        self.layers[2].weight = nn.Parameter(torch.randn(16, 2).T)

    def loss(self, rank, step):
        generator = torch.Generator("cpu").manual_seed(10 * step + rank)
        inputs = torch.randn(3, 4, generator=generator, device="cpu")
        return self.layers(inputs.to(self.unused.weight.device)).square().mean()


def weights_follow_one_process_behind_data_parallelism(context):
    alone = PartlyUsed()
    module = PartlyUsed()
    reference = AdamW(alone.parameters(), lr=0.01)
    optimizer = ShardedOptimizer(module.parameters(), AdamW, lr=0.01, bucket_size_mb=SMALL_MB)
    wrapped = BucketedDDP(module, bucket_size_mb=SMALL_MB)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        reference.zero_grad(set_to_none=step % 2 == 0)
        for rank, part in itertools.product(range(context.world_size), (0, 100)):
            (alone.loss(rank, step + part) / context.world_size).backward()
        with wrapped.no_sync():
            module.loss(context.rank, step).backward()
        module.loss(context.rank, step + 100).backward()
        wrapped.finish_gradient_synchronization()
        for parameter, expected in zip(module.parameters(), alone.parameters(), strict=True):
            assert (parameter.grad is None) == (expected.grad is None)
        optimizer.step()
        reference.step()
        same_weights(wrapped, alone, step, rtol=1.3e-6, atol=1e-5)


def weight(*shape):
    return nn.Parameter(torch.ones(shape))


def wrong_arguments_are_refused(context):
    """And, on every rank, ranks that disagree; the group still works."""
    first = context.rank == 0
    weights = [weight(4, 4) for _ in range(3)]
    elsewhere = nn.Parameter(torch.empty(2, device="meta"))
    make = partial(ShardedOptimizer, optimizer_cls=SGD, lr=0.1)
    classes = [
        (partial(make, weights, optimizer_cls=nn.Linear), "allowed: a subclass of torch.optim."),
        (partial(make, weights, optimizer_cls=LBFGS), "LBFGS, which looks at all parameters"),
    ]
    others = [
        (partial(make, weights + [elsewhere]), "allowed: with values"),
        (partial(make, weights, bucket_size_mb=0), "bucket_size_mb is 0; allowed"),
    ]
    unlike = [
        (partial(make, weights[: 2 + first]), "rank 0 has '(4, 4)"),
        (partial(make, weights, optimizer_cls=SGD if first else AdamW), "AdamW"),
    ]
    for construct, words in classes + others + unlike:
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            construct()
    dist.barrier()


def parameters_that_are_moved_are_noticed(context):
    moved = weight(4, 4)
    optimizer = ShardedOptimizer([moved], AdamW)
    moved.data = moved.data.clone()
    with pytest.raises(RuntimeError, match="no longer where the optimizer has put it"):
        optimizer.step()


def a_state_is_loaded_by_its_own_rank(context):
    """What is trained on is the same; that of another shard is refused."""
    module = Mixed()
    copied = Mixed()
    optimizer = ShardedOptimizer(module.groups(), AdamW)
    other = ShardedOptimizer(copied.groups(), AdamW)
    set_gradients(module, 0)
    optimizer.step()
    state = optimizer.state_dict()
    another = (context.rank + 1) % context.world_size
    shard = [another, context.world_size]
    with pytest.raises(ValueError, match=rf"of shard {re.escape(str(shard))} .*allowed"):
        other.load_state_dict(state | {"shard": shard})
    with pytest.raises(ValueError, match=r"other ranks own .*; allowed: the same"):
        ShardedOptimizer(Mixed().groups()[::-1], AdamW).load_state_dict(state)
    copied.load_state_dict(module.state_dict())
    other.load_state_dict(copy.deepcopy(state))
    other.add_param_group({"params": [weight(2)]})
    for model, trained in ((module, optimizer), (copied, other)):
        set_gradients(model, 1)
        trained.step()
    assert_same(copied, module)


PROMISES = [
    every_property_of_the_checker,
    weights_are_bitwise_those_of_the_whole_optimizer,
    a_bucket_leaves_before_the_next_one_is_updated,
    weights_follow_one_process_behind_data_parallelism,
    wrong_arguments_are_refused,
    parameters_that_are_moved_are_noticed,
    a_state_is_loaded_by_its_own_rank,
]


GPUS = pytest.param("nccl", 2, marks=pytest.mark.gpu(2))


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("gloo", 3), GPUS])
def test_it_keeps_its_promises(backend, ranks):
    launch(run, ranks, *PROMISES, backend=backend, timeout_s=200)


@pytest.mark.parametrize(("world_size", "padding"), [(2, 1e-5), (3, 0.01), (8, 0.02)])
def test_the_largest_size_of_the_handout_is_partitioned_almost_evenly(world_size, padding):
    model = build_model(model_size("xl", 2026), 16, device="meta")
    tensors = list(model.parameters())
    buckets = partition_tensors(tensors, world_size, 512)
    segments = itertools.chain(*buckets)
    assert sum(map(len, segments)) == len(tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    padded = world_size * sum(map(segment_bytes, buckets))
    assert total <= padded <= (1 + padding) * total
