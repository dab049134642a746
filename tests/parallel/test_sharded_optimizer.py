"""The sharded optimizer against the optimizer that it shards.

Checks are run by `wrappers.run`; each asserts on every rank what it says in its docstring.
"""

import copy
import itertools
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW
from wrappers import Odd, passes, run, same_weights

from cs336_systems.checks import check_sharded_optimizer
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import BucketedDDP, ReduceScatterDDP, ShardedOptimizer, launch, shards
from cs336_systems.traffic import watch_collectives

SMALL_MB = 1e-3  # buckets of about two matrices
MATRICES, WIDTH = 6, 8


class Mixed(Odd):
    """And matrices, vectors, two dtypes, and parameters without a gradient."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH + n) for n in range(MATRICES))
        self.vectors = nn.ParameterList(torch.randn(WIDTH) for _ in range(MATRICES))
        self.short, self.unused = (
            nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16()),
            nn.Parameter(torch.ones(2)),
        )
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def groups(self):
        """The first has only one parameter."""
        matrices = [*self.matrices, self.transposed, self.short, self.frozen, self.unused]
        vectors = {"params": [*self.vectors[1:], self.scalar, self.empty], "lr": 0.03}
        return [{"params": [self.vectors[0]]}, {"params": matrices, "weight_decay": 0.1}, vectors]


def set_gradients(module, step):
    """The same on every rank, as data parallelism leaves them."""
    generator = torch.Generator("cpu").manual_seed(step)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, device="cpu")
        if name not in ("frozen", "unused", "empty"):  # Adafactor divides by the size
            parameter.grad = torch.empty_like(parameter).copy_(values)


def assert_same(module, expected, what=None):
    for (name, parameter), wanted in zip(
        module.named_parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(parameter, wanted), (what, name)
        assert parameter.stride() == wanted.stride(), (what, name)


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
    (AdamW, {"foreach": False}),
    (Adagrad, {"initial_accumulator_value": 0.5}),
    (Adafactor, {}),
    (Counts, {"lr": 0.1}),
]


def bitwise(context):
    """Every weight is that of the unsharded optimizer, whatever the class, the groups and the schedule.

    A rank that updates nothing has the settings of the groups all the same.
    """
    for (kind, settings), (size, count) in itertools.product(
        OPTIMIZERS, ((SMALL_MB, 99), (100, 99), (1, 1))
    ):
        alone, module = Mixed(), Mixed()
        sharded = ShardedOptimizer(module.groups()[:count], kind, bucket_size_mb=size, **settings)
        optimizers = kind(alone.groups()[:count], **settings), sharded
        assert (len(sharded._buckets) > 3) == (size == SMALL_MB)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
        for step in range(4):
            for optimizer, scheduler, model in zip(
                optimizers, schedulers, (alone, module), strict=True
            ):
                set_gradients(model, step)
                optimizer.step()
                scheduler.step()
            assert_same(module, alone, (kind, step))
        assert all(sharded.owner(parameter) == context.rank for parameter in sharded.state)
        groups = [
            [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
            for o in optimizers
        ]
        assert groups[0] == groups[1]


def every_property_of_the_checker(context):
    """In one bucket and in several."""
    for size in (SMALL_MB, 100):
        passes(context, partial(ShardedOptimizer, bucket_size_mb=size), check_sharded_optimizer)


def overlap(context):
    """A bucket leaves before the next one is updated; no bucket is larger than asked."""
    module, events = Mixed(), []

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


def with_data_parallelism(context):
    """Trained with either way to average gradients, weights are those of one process on the whole batch."""

    def model():
        torch.manual_seed(0)
        layers = [
            nn.Linear(4, 16),
            nn.Tanh(),
            nn.Linear(16, 16, bias=False),
            nn.Tanh(),
            nn.Linear(16, 2),
        ]
        module = nn.Sequential(*layers, nn.Linear(2, 2))  # the last one is not used
        module[0].bias.requires_grad_(False)
        module[4].weight = nn.Parameter(torch.randn(2, 16))
        return module

    def loss(module, rank, step):
        generator = torch.Generator("cpu").manual_seed(10 * step + rank)
        inputs = torch.randn(3, 4, generator=generator, device="cpu").to(context.device)
        return module[:5](inputs).square().mean()

    for scatters, size in ((False, SMALL_MB), (True, SMALL_MB), (True, 100)):
        alone, module = model(), model()
        optimizer = ShardedOptimizer(module.parameters(), AdamW, lr=0.01, bucket_size_mb=SMALL_MB)
        wrapped = (
            ReduceScatterDDP(module, optimizer, size) if scatters else BucketedDDP(module, size)
        )
        reference = AdamW(alone.parameters(), lr=0.01)
        for step in range(4):
            for each in (optimizer, reference):
                each.zero_grad(set_to_none=step % 2 == 0)
            for rank, part in itertools.product(range(context.world_size), (0, 100)):
                (loss(alone, rank, step + part) / context.world_size).backward()
            with wrapped.no_sync():
                loss(module, context.rank, step).backward()
            loss(module, context.rank, step + 100).backward()
            wrapped.finish_gradient_synchronization()
            for parameter, of_all in zip(module.parameters(), alone.parameters(), strict=True):
                mine = not scatters or (
                    of_all.grad is not None and optimizer.owner(parameter) == context.rank
                )
                assert (parameter.grad is not None) == (mine and of_all.grad is not None)
            optimizer.step()
            reference.step()
            same_weights(wrapped, alone, (scatters, size, step), rtol=1.3e-6, atol=1e-5)
    loss(module, context.rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"second backward pass .* no_sync"):
        loss(module, context.rank, 0).backward()


def refusals(context):
    """Bad arguments, and ranks that disagree, are one sentence on every rank; the group still works."""
    first = context.rank == 0
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    view = nn.Parameter(weights[0].data)
    elsewhere = nn.Parameter(torch.empty(2, device="meta"))

    def make(params, optimizer_cls=SGD, **settings):
        return lambda: ShardedOptimizer(params, optimizer_cls, **{"lr": 0.1} | settings)

    for construct, words in (
        (make(weights, nn.Linear), "allowed: a subclass of torch.optim.Optimizer"),
        (make(weights, torch.optim.LBFGS), "LBFGS, whose step needs a closure"),
        (make([*weights, elsewhere]), "allowed: with values"),
        (make([weights[0], view]), "two parameters share their memory"),
        (make(weights, bucket_size_mb=0), "bucket_size_mb is 0; allowed"),
        (make(weights if first else []), "rank 1 has 'ValueError: optimizer got an empty"),
        (make(weights[: 2 + context.rank]), "rank 0 has 'nothing' where rank 1 has '(4, 4)"),
        (make(weights, SGD if first else AdamW), "AdamW"),
        (make([{"params": weights, "lr": context.rank}]), "group {'lr': 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            construct()
    dist.barrier()
    optimizer, (late, frozen) = (
        ShardedOptimizer(weights, AdamW),
        nn.ParameterList([*torch.ones(2, 2)]),
    )
    other = nn.Parameter(torch.ones(2 + context.rank))
    for group, words in (([late, other], "rank 1"), (weights[:1], "more than one parameter group")):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": group})
    assert len(optimizer.param_groups) == 1
    for parameter in (late, frozen.requires_grad_(False)):
        optimizer.add_param_group({"params": [parameter]})
    frozen.requires_grad_().grad = torch.zeros(2)
    with pytest.raises(RuntimeError, match="frozen when wrapped or given"):
        optimizer.step()
    frozen.grad = None
    for shard in ([(context.rank + 1) % context.world_size, context.world_size], None):
        words = rf"of shard {re.escape(str(shard))} .*allowed: \[{context.rank}, "
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(optimizer.state_dict() | {"shard": shard})
    weights[0].data = weights[0].data.clone()
    with pytest.raises(RuntimeError, match="no longer where the optimizer has put it"):
        optimizer.step()
    with pytest.raises(ValueError, match="has no owner"):
        ReduceScatterDDP(nn.Linear(2, 2), optimizer)


def shard_of_its_own(context):
    """A rank's own state_dict brings back its shard, and what is trained on is the same."""
    module, again = Mixed(), Mixed()
    optimizer, other = (ShardedOptimizer(model.groups(), AdamW) for model in (module, again))
    set_gradients(module, 0)
    optimizer.step()
    again.load_state_dict(module.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(other.param_groups) == 4
    for model, each in ((module, optimizer), (again, other)):
        set_gradients(model, 1)
        each.step()
    assert_same(again, module)


CHECKS = [every_property_of_the_checker, bitwise, overlap, with_data_parallelism, refusals]
CHECKS += [shard_of_its_own]


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("gloo", 2), ("gloo", 3), pytest.param("nccl", 2, marks=pytest.mark.gpu(2))],
)
def test_it_keeps_its_promises(backend, ranks):
    launch(run, ranks, *CHECKS, backend=backend, timeout_s=200)


@pytest.mark.parametrize(("world_size", "padding"), [(2, 1e-5), (3, 0.01), (8, 0.02)])
def test_the_sizes_of_the_handout_are_partitioned_almost_evenly(world_size, padding):
    for name, edition in (("medium", 2025), ("xl", 2025), ("xl", 2026)):
        tensors = list(build_model(model_size(name, edition), 16, device="meta").parameters())
        buckets = shards.partition_tensors(tensors, world_size, 512)
        assert sum(len(segment) for segments in buckets for segment in segments) == len(tensors)
        total = sum(shards.shard_bytes(buckets))
        assert total == sum(tensor.nbytes for tensor in tensors)
        padded = world_size * sum(shards.segment_bytes(segments) for segments in buckets)
        assert total <= padded <= (1 + padding) * total
