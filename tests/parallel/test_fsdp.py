"""FSDP against one process, and what it promises beyond what is asked of every wrapper.

Checks are run by `wrappers.run`; each asserts on every rank what it says in its docstring.
"""

import copy
import gc
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from wrappers import one_pass, passes, run, train

from cs336_systems.checks import check_fsdp
from cs336_systems.checks.fsdp_checks import GROUPS
from cs336_systems.configs import model_size
from cs336_systems.model import Linear, build_model
from cs336_systems.parallel import FSDP, launch
from cs336_systems.traffic import watch_collectives
from cs336_systems.training.checkpointing import forward_with, policy
from cs336_systems.training.fused import use_fused_loss

BLOCKS = {"unit_types": ("TransformerBlock",)}
UNITS = {
    "weights": {},
    "weights, nothing ahead": {"prefetch": 0},
    "blocks": BLOCKS,
    "blocks, one ahead": BLOCKS | {"prefetch": 1},
    "blocks, kept": BLOCKS | {"reshard": False},
    "halves of blocks": {"unit_types": ("CausalSelfAttention", "SwiGLU"), "prefetch": 1},
}
VOCABULARY, LENGTH = 512, 8


def tiny(seed=0):
    torch.manual_seed(seed)
    return build_model(model_size("tiny"), LENGTH)


def batch(rank, step=0):
    generator = torch.Generator("cpu").manual_seed(100 * step + rank)
    numbers = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=generator, device="cpu")
    return numbers.to(torch.get_default_device())


def every_property_of_the_checker(context):
    """For every kind of group. Over NCCL gathers are calls on a stream, not handles that a checker sees."""
    groups = [name for name in GROUPS if name != "prefetch" or context.backend == "gloo"]
    for options in ({}, {"unit_types": ("Toy",)}):
        passes(context, partial(FSDP, **options), check_fsdp, only=groups)


def hooks_of_shards(context):
    """A post-accumulate hook finds the mean of all ranks, once."""
    wrapped, found = FSDP(tiny(), **BLOCKS), {}
    for p in wrapped._sharded:
        p.register_post_accumulate_grad_hook(
            lambda p: found.setdefault(p, []).append(p.grad.clone())
        )
    one_pass(wrapped, batch(context.rank)[0])
    assert all(len(found[p]) == 1 and found[p][0].equal(p.grad) for p in wrapped._sharded)


def recomputation(context):
    """Checkpointed blocks and segments gather again what they compute again."""
    units, names = (
        ("weights", "blocks, one ahead", "blocks, kept"),
        ("every 1", "every 2", "recursive"),
    )
    cases = [(UNITS[unit], name) for unit in units for name in names]
    for options, name in [*cases, (UNITS["halves of blocks"], "half blocks"), (BLOCKS, None)]:

        def loss(model, rank, step, name=name):
            tokens, targets = batch(rank, step)
            if not isinstance(model, FSDP):
                logits = model(tokens)
            elif name is None:
                logits = checkpoint(model, tokens, use_reentrant=False)
            else:
                logits = forward_with(model.module, policy(name), tokens)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        pair, make = (
            (tiny(), FSDP(tiny(context.rank), **options)),
            partial(SGD, lr=0.1, momentum=0.9),
        )
        train(context, *pair, loss, (options, name), make=make, max_norm=0.5)


class Pair(nn.Module):
    """Two layers in one module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(LENGTH, 6), Linear(6, LENGTH)

    def forward(self, x, both=True):
        return x + self.down(self.up(x).tanh()) if both else self.up(x)


def compiled(context):
    """Modules compiled before or after they are wrapped, by their method or as new modules."""
    how = {"backend": "aot_eager", "fullgraph": True}
    torch.manual_seed(0)
    alone = nn.Sequential(Pair(), Pair(), Pair(), Linear(LENGTH, LENGTH))
    module = copy.deepcopy(alone)
    module[0].compile(**how)
    module[1] = torch.compile(module[1], **how)
    wrapped = FSDP(module, unit_types=(Pair,))
    module[2].compile(**how)

    def loss(model, rank, step):
        return model((batch(rank, step)[0] % 7).float()).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's compiler looks at .grad of what has none
        train(context, alone, wrapped, loss, "compiled", make=partial(SGD, lr=0.01))


def compute_dtype(context):
    """In bfloat16 every kind of group learns, of a head that makes the loss, too; norms are of float32."""
    for options in UNITS.values():
        tokens, targets = batch(context.rank)
        wrapped = FSDP(
            use_fused_loss(tiny()), torch.bfloat16, **options
        )  # its head is of another class
        optimizer, losses = torch.optim.AdamW(wrapped.parameters(), lr=3e-3), []
        for _ in range(8):
            optimizer.zero_grad()
            losses.append(wrapped(tokens, targets))
            losses[-1].backward()
            wrapped.finish_gradient_synchronization()
            optimizer.step()
        assert losses[-1] < 0.5 * losses[0]
        logits = FSDP(tiny(), torch.bfloat16, **options)(tokens)
        expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).item()
        assert losses[0].item() == pytest.approx(expected, rel=1e-2)
    wrapped = FSDP(Linear(64, 64, dtype=torch.float16))
    (weight,) = wrapped.parameters()
    weight.grad = torch.full_like(weight, 10)  # float16 cannot hold the square of the norm
    assert wrapped.clip_grad_norm_(64).item() == pytest.approx(640, rel=1e-3)
    torch.testing.assert_close(weight.grad, torch.ones_like(weight), rtol=1e-2, atol=0)


def schedule(context):
    """Each group is gathered in forward and, but for the last, in backward; few are whole at once."""
    tokens, _ = batch(0)
    for ahead, name in ((2, "weights"), (0, "weights, nothing ahead"), (1, "blocks, one ahead")):
        wrapped, held = FSDP(tiny(), **UNITS[name]), []
        groups = wrapped._groups

        def count(*_, groups=groups, held=held):
            held.append(sum(group._memory.nbytes() > 0 for group in groups))

        for module in wrapped.module.modules():
            module.register_forward_hook(count)
        for weight in (weight for group in groups for weight in group.weights):
            weight.whole.register_hook(count)
        for _ in range(2):  # the order is known from the first
            held.clear()
            with watch_collectives() as messages:
                one_pass(wrapped, tokens)
        gathers = sum(message.collective == "all_gather" for message in messages)
        assert gathers == 2 * sum(len(g.weights) for g in groups) - len(wrapped._order[-1].weights)
        assert max(held) == ahead + 1
        with torch.no_grad():
            wrapped(tokens)
        assert not any(group._memory.nbytes() for group in groups)
        with watch_collectives() as messages, wrapped.no_sync():
            wrapped(tokens).sum().backward()
        assert {message.collective for message in messages} == {"all_gather"}


def stale_weights(context):
    """After a forward alone and a step, nothing is stale."""
    wrapped, inputs = FSDP(nn.Sequential(Linear(4, 4), Linear(4, 4))), torch.ones(1, 4)
    one_pass(wrapped, inputs)
    wrapped(inputs)  # the last group stays gathered, as for backward
    SGD(wrapped.parameters(), lr=1.0).step()
    first, second = wrapped.gather_full_parameters().values()
    torch.testing.assert_close(wrapped.module[1](inputs), inputs @ second.T)
    torch.testing.assert_close(wrapped(inputs), inputs @ first.T @ second.T)


def memory_on_gpus(context):
    """A step holds a few units and its shards, no more."""
    width, depth, layer = 2048, 12, 4 * 2048**2  # layer: its bytes
    inputs = torch.randn(4096, width)
    wrapped = FSDP(nn.Sequential(*(Linear(width, width) for _ in range(depth))), prefetch=1)
    gc.collect()
    before, shards = torch.cuda.memory_allocated(), layer * depth / context.world_size
    assert before < shards + inputs.nbytes + layer
    optimizer = SGD(wrapped.parameters(), lr=1e-6)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        wrapped(inputs)
    assert torch.cuda.max_memory_allocated() < before + shards + 4 * inputs.nbytes + 3 * layer


def slow_sums_on_gpus(context):
    """Means that are added to others are in no memory that is used again before they are added."""
    wrapped, means = FSDP(nn.Sequential(*(Linear(256, 256) for _ in range(4)))), []

    def delay(_):
        with torch.cuda.stream(wrapped._groups[0]._reduce_stream.cuda):
            torch.cuda._sleep(20_000_000)  # cycles: 10 ms

    for group in wrapped._groups:
        group.weights[0].whole.register_hook(delay)
    for count in (1, 3):
        wrapped.zero_grad()
        for _ in range(count):
            wrapped(torch.ones(8, 256)).square().mean().backward()
            _ = [torch.full((128, 256), torch.nan) for _ in range(50)]  # as large as a shard
        wrapped.finish_gradient_synchronization()
        means.append([parameter.grad / count for parameter in wrapped.parameters()])
    torch.testing.assert_close(*means)


def two_passes(context):
    """What only the first of two passes has used keeps its gradient."""
    wrapped, found = FSDP(Pair(), unit_types=(Pair,)), []
    for passes_ in ((True,), (True, False)):
        wrapped.zero_grad()
        for both in passes_:
            wrapped(torch.ones(2, LENGTH), both).sum().backward()
        wrapped.finish_gradient_synchronization()
        found.append(wrapped.module.down.weight.grad)
    torch.testing.assert_close(*found)


TWO_RANKS = [
    compute_dtype,
    hooks_of_shards,
    schedule,
    recomputation,
    compiled,
    stale_weights,
    two_passes,
]
GPUS = [pytest.param("nccl", n, marks=pytest.mark.gpu(n)) for n in (2, 4)]


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("gloo", 4), *GPUS])
def test_it_keeps_its_promises(backend, ranks):
    checks = [every_property_of_the_checker, *TWO_RANKS * (ranks == 2)]
    launch(run, ranks, *checks, backend=backend, timeout_s=300)


@pytest.mark.gpu(2)
def test_on_gpus_memory_is_freed_and_not_too_early():
    launch(run, 2, memory_on_gpus, slow_sums_on_gpus, backend="nccl", timeout_s=300)
