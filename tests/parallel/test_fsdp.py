"""FSDP against one process, and what it promises beyond what is asked of every wrapper.

Each check is a promise, which its name says; `wrappers.run` runs it on every rank.
"""

import copy
import itertools
import warnings
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint
from wrappers import one_pass, passes, run, train

from cs336_systems.checks import check_fsdp, ddp_checks, fsdp_checks
from cs336_systems.checks.fsdp_checks import GROUPS
from cs336_systems.checks.on_ranks import checker
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
    "halves of blocks": {"unit_types": ("CausalSelfAttention", "SwiGLU"), "prefetch": 1},
}
VOCABULARY = 512
LENGTH = 8


def tiny(seed=0):
    torch.manual_seed(seed)
    return build_model(model_size("tiny"), LENGTH)


def batch(rank, step=0):
    generator = torch.Generator("cpu").manual_seed(100 * step + rank)
    numbers = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=generator, device="cpu")
    return numbers.to(torch.get_default_device())


def every_property_of_the_checker(context):
    """Over NCCL gathers are calls on a stream, not handles that a checker sees."""
    groups = [name for name in GROUPS if name != "prefetch" or context.backend == "gloo"]
    passes(context, FSDP, check_fsdp, only=groups)


def training_goes_on_as_in_one_process(context):
    """With odd numbers of rows, tied, frozen and unused weights; with several passes before a step."""
    for unit in ({}, {"unit_types": ("Toy",)}):
        passes(context, partial(FSDP, **unit), _follows)


def _unused(*_):
    return {"rarely": False}


@checker
def _follows(wrap):
    train_both = partial(ddp_checks.follow, wrap, weights=fsdp_checks._whole)
    yield from train_both("unused weights", options=_unused)
    yield from train_both("three passes", make=fsdp_checks._Layers, passes=3)


def a_hook_of_a_shard_finds_the_mean_of_all_ranks_once(context):
    wrapped = FSDP(tiny(), **BLOCKS)
    means = defaultdict(list)
    for shard in wrapped._sharded:
        shard.register_post_accumulate_grad_hook(lambda p: means[p].append(p.grad.clone()))
    one_pass(wrapped, batch(context.rank)[0])
    for shard in wrapped._sharded:
        (mean,) = means[shard]
        assert mean.equal(shard.grad)


def loss_of(name, model, rank, step):
    """name: of the policy that a wrapped model follows; None: backward computes all of it once more."""
    tokens, targets = batch(rank, step)
    if not isinstance(model, FSDP):
        logits = model(tokens)
    elif name is None:
        logits = checkpoint(model, tokens, use_reentrant=False)
    else:
        logits = forward_with(model.module, policy(name), tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def checkpointed_blocks_gather_again_what_they_compute_again(context):
    units = ("weights", "blocks, one ahead")
    cases = list(itertools.product(units, ("every 1", "every 2", "recursive")))
    cases += [("halves of blocks", "half blocks"), ("blocks", None)]
    make = partial(SGD, lr=0.1, momentum=0.9)
    for unit, name in cases:
        wrapped = FSDP(tiny(context.rank), **UNITS[unit])
        loss = partial(loss_of, name)
        train(context, tiny(), wrapped, loss, (unit, name), make=make, max_norm=0.5)


class Pair(nn.Module):
    """Two layers in one module."""

    def __init__(self):
        super().__init__()
        self.up = Linear(LENGTH, 6)
        self.down = Linear(6, LENGTH)

    def forward(self, x, both=True):
        return x + self.down(self.up(x).tanh()) if both else self.up(x)


def modules_may_be_compiled_before_or_after(context):
    """By their method or as new modules."""
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
        # PyTorch's compiler looks at .grad of what has none.
        warnings.simplefilter("ignore")
        train(context, alone, wrapped, loss, "compiled", make=partial(SGD, lr=0.01))


def every_kind_of_group_learns_in_bfloat16(context):
    tokens, targets = batch(context.rank)
    for options in UNITS.values():
        # Its head makes the loss, and is of another class.
        wrapped = FSDP(use_fused_loss(tiny()), torch.bfloat16, **options)
        optimizer = AdamW(wrapped.parameters(), lr=3e-3)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            losses.append(wrapped(tokens, targets))
            losses[-1].backward()
            wrapped.finish_gradient_synchronization()
            optimizer.step()
        assert losses[-1] < 0.5 * losses[0]


def norms_of_float16_are_of_float32(context):
    wrapped = FSDP(Linear(64, 64, dtype=torch.float16))
    (weight,) = wrapped.parameters()
    # float16 cannot hold the square of the norm.
    weight.grad = torch.full_like(weight, 10)
    assert wrapped.clip_grad_norm_(64).item() == pytest.approx(640, rel=1e-3)
    torch.testing.assert_close(weight.grad, torch.ones_like(weight), rtol=1e-2, atol=0)


def whole(groups):
    return sum(group._memory.nbytes() > 0 for group in groups)


def weights_of(groups):
    return sum(len(group.weights) for group in groups)


def gathers_of_a_step(wrapped):
    with watch_collectives() as messages:
        one_pass(wrapped, batch(0)[0])
    return [message.collective for message in messages].count("all_gather")


def groups_are_gathered_once_in_forward_and_once_in_backward(context):
    """But the last, which stays; few are whole at once."""
    tokens, _ = batch(0)
    for ahead, name in ((2, "weights"), (0, "weights, nothing ahead"), (1, "blocks, one ahead")):
        wrapped = FSDP(tiny(), **UNITS[name])
        groups = wrapped._groups
        held = []

        def count(*_, groups=groups, held=held):
            held.append(whole(groups))

        for module in wrapped.module.modules():
            module.register_forward_hook(count)
        for group in groups:
            for weight in group.weights:
                weight.whole.register_hook(count)
        # The order is known from the first.
        for _ in range(2):
            held.clear()
            gathers = gathers_of_a_step(wrapped)
        assert gathers == 2 * weights_of(groups) - weights_of(wrapped._order[-1:])
        assert max(held) == ahead + 1
        with torch.no_grad():
            wrapped(tokens)
        assert whole(groups) == 0
        with watch_collectives() as messages, wrapped.no_sync():
            wrapped(tokens).sum().backward()
        assert {message.collective for message in messages} == {"all_gather"}


def no_weight_is_stale_after_a_forward_alone_and_a_step(context):
    wrapped = FSDP(nn.Sequential(Linear(4, 4), Linear(4, 4)))
    inputs = torch.ones(1, 4)
    one_pass(wrapped, inputs)
    # The last group stays gathered, as for backward.
    wrapped(inputs)
    SGD(wrapped.parameters(), lr=1.0).step()
    first, second = wrapped.gather_full_parameters().values()
    torch.testing.assert_close(wrapped.module[1](inputs), inputs @ second.T)
    torch.testing.assert_close(wrapped(inputs), inputs @ first.T @ second.T)


def means_on_gpus_are_added_before_their_memory_is_used_again(context):
    wrapped = FSDP(nn.Sequential(*(Linear(256, 256) for _ in range(4))))
    means = []

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


def what_only_the_first_of_two_passes_has_used_keeps_its_gradient(context):
    wrapped = FSDP(Pair(), unit_types=(Pair,))
    gradients = []
    for uses in ((True,), (True, False)):
        wrapped.zero_grad()
        for both in uses:
            wrapped(torch.ones(2, LENGTH), both).sum().backward()
        wrapped.finish_gradient_synchronization()
        gradients.append(wrapped.module.down.weight.grad)
    torch.testing.assert_close(*gradients)


TWO_RANKS = [
    training_goes_on_as_in_one_process,
    every_kind_of_group_learns_in_bfloat16,
    norms_of_float16_are_of_float32,
    a_hook_of_a_shard_finds_the_mean_of_all_ranks_once,
    groups_are_gathered_once_in_forward_and_once_in_backward,
    checkpointed_blocks_gather_again_what_they_compute_again,
    modules_may_be_compiled_before_or_after,
    no_weight_is_stale_after_a_forward_alone_and_a_step,
    what_only_the_first_of_two_passes_has_used_keeps_its_gradient,
]
GPUS = [pytest.param("nccl", n, marks=pytest.mark.gpu(n)) for n in (2, 4)]


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("gloo", 4)] + GPUS)
def test_it_keeps_its_promises(backend, ranks):
    checks = [every_property_of_the_checker] + TWO_RANKS * (ranks == 2)
    launch(run, ranks, *checks, backend=backend, timeout_s=300)


@pytest.mark.gpu(2)
def test_on_gpus_memory_is_not_freed_too_early():
    check = means_on_gpus_are_added_before_their_memory_is_used_again
    launch(run, 2, check, backend="nccl", timeout_s=300)
