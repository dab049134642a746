"""The leaderboard's step: it trains as the plain model does; moments on the host; what is kept."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cs336_systems.configs import model_size
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.parallel import SHARDINGS, launch
from cs336_systems.training import FULL_STEPS
from cs336_systems.training.full_steps import keep_matmuls
from cs336_systems.training.leaderboard import (
    SETTINGS,
    Batch,
    OffloadedAdamW,
    ShardedModel,
    fill,
    first_losses,
)

CONFIG = model_size("tiny", 2026)
BATCH = Batch(4, 8, "float32")


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))


def offload(net, *numbers):
    """The weights' gradients come after the biases'."""
    away = [[net[number].bias, net[number].weight] for number in numbers]
    return OffloadedAdamW(net.parameters(), away)


def train(net, optimizer, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        net.zero_grad()
        x = torch.randn(7, 5, generator=generator)
        net(x).square().sum().backward()
        optimizer.step()


def test_moments_on_the_host_change_no_update():
    net = layers()
    plain = layers()
    optimizer = offload(net, 1, 2)
    train(net, optimizer)
    train(plain, torch.optim.AdamW(plain.parameters(), **SETTINGS))
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    for on_device, moments in optimizer.blocks:
        for p, states in moments.items():
            # They are on the host alone, and were used.
            assert list(on_device.state[p]) == ["step"]
            assert all(state.any() for state in states.values())


def test_a_block_is_updated_in_backward_when_its_last_gradient_has_come():
    net = layers()
    optimizer = offload(net, 2)
    before = copy.deepcopy(net)
    net(torch.randn(7, 5)).sum().backward()
    assert torch.equal(net[1].weight, before[1].weight)
    assert not torch.equal(net[2].weight, before[2].weight)
    optimizer.step()
    assert not torch.equal(net[1].weight, before[1].weight)


def test_neither_parameters_nor_moments_outlive_their_owner():
    """A hook that held the optimizer would be a circle that Python cannot see."""
    net = layers()
    optimizer = offload(net, 1)
    train(net, optimizer, steps=1)
    owner = weakref.ref(optimizer)
    weight = weakref.ref(net[1].weight)
    del optimizer
    gc.collect()
    assert owner() is None
    # The hook has nothing to visit.
    net(torch.randn(7, 5)).sum().backward()
    del net
    gc.collect()
    assert weight() is None


def plain_losses(steps=3):
    """One process, the whole batch, PyTorch's AdamW."""
    torch.manual_seed(0)
    net = build_model(CONFIG, BATCH.context_length)
    shape = (2, BATCH.size, BATCH.context_length)
    tokens, targets = torch.randint(CONFIG.vocab_size, shape)
    optimizer = torch.optim.AdamW(net.parameters(), **SETTINGS)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(net(tokens), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
        optimizer.step()
        yield loss.item(), norm.item()


# Without a compiler. FSDP2's keep all of the last block, and of the other what their checkpoint keeps.
STEPS = {
    "fsdp2_selective": replace(FULL_STEPS["fsdp2_selective"], compiles=False),
    "fsdp2_matmuls": replace(FULL_STEPS["fsdp2_matmuls"], compiles=False),
    "stacked_selective": FULL_STEPS["stacked_selective"],
    "offloaded": FULL_STEPS["offloaded"],
}


def losses_of(context):
    """First losses by the name of the step; each rank has two of the four sequences."""
    losses = {}
    for name, parts in STEPS.items():
        wrap = SHARDINGS[parts.sharding].wrap
        run = ShardedModel(parts, CONFIG, BATCH, context, wrap, whole=1)
        if parts.keeps is None:
            run.keep({"qkv": 1, "h": 0, "ab": 2})
            assert run.net.layers[0].keep == {"ab"}
            assert run.net.layers[1].keep == {"ab", "qkv"}
        assert run.tokens.shape == run.targets.shape == (2, BATCH.context_length)
        assert bool(run.optimizer.blocks) == parts.offloads
        losses[name] = [(row["loss"], row["gradient_norm"]) for row in first_losses(run)]
    return losses


def test_sharded_steps_train_as_one_process_does():
    """Whatever shards, is kept, or is moved away: loss and norm of the gradient, step by step."""
    wanted = list(plain_losses())
    by_rank = launch(losses_of, 2, backend="gloo", timeout_s=300)
    for losses in by_rank:
        for name, rows in losses.items():
            torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=0, msg=name)


@pytest.mark.parametrize(
    ("room", "counts"),
    [(-5, (0, 0, 0)), (39, (1, 0, 1)), (100, (3, 0, 1)), (180, (3, 3, 2)), (999, (3, 3, 3))],
)
def test_memory_is_filled_with_the_largest_first(room, counts):
    sizes = {"qkv": 25, "h": 7, "ab": 30}
    assert fill(room, sizes, layers=3) == dict(zip(("ab", "qkv", "h"), counts, strict=True))


def test_every_second_matmul_is_kept():
    """Of four, the second and the fourth are made again in backward."""
    made = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            made.append(operation)
            return operation(*args, **kwargs or {})

    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(4)]

    def block(x):
        for weight in weights:
            x = (x @ weight).sin()
        return x

    y = checkpoint(block, torch.randn(3, 3), use_reentrant=False, context_fn=keep_matmuls)
    made.clear()
    with Count():
        y.sum().backward()
    # Four gradients of weights, three of inputs.
    assert made.count(torch.ops.aten.mm.default) == 7 + 2
