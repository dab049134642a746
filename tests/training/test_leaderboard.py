"""The leaderboard's step: it trains as the plain model does; moments on the host; what is kept."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from cs336_systems.configs import model_size
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.parallel import SHARDINGS, launch
from cs336_systems.training import FULL_STEPS
from cs336_systems.training.leaderboard import (
    SETTINGS,
    Batch,
    OffloadedAdamW,
    ShardedModel,
    allocator_retried,
    fill,
    first_losses,
    keep_fewer,
    offloaded,
)

CONFIG = model_size("tiny", 2026)
BATCH = Batch(4, 8, "float32")


def layers(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(count)))


def offload(net, *numbers):
    """The weights' gradients come after the biases'."""
    away = [[net[number].bias, net[number].weight] for number in numbers]
    return OffloadedAdamW(net.parameters(), away)


def train(net, optimizer, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(7, 5, generator=generator)).square().sum().backward()
        optimizer.step()


def test_moments_on_the_host_change_no_update():
    net = layers()
    plain = layers()
    train(net, offload(net, 1, 2))
    train(plain, torch.optim.AdamW(plain.parameters(), **SETTINGS))
    for ours, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, wanted)


def test_between_steps_moments_are_on_the_host_alone():
    net = layers()
    optimizer = offload(net, 2)
    train(net, optimizer)
    stays = {name for state in optimizer.stays.state.values() for name in state}
    assert stays == {"step", "exp_avg", "exp_avg_sq"}
    ((on_device, moments),) = optimizer.blocks
    for p in net[2].parameters():
        assert set(on_device.state[p]) == {"step"}
        assert all(state.any() and state.device.type == "cpu" for state in moments[p].values())


def test_a_block_is_updated_in_backward_when_its_last_gradient_has_come():
    net = layers()
    optimizer = offload(net, 2)
    before = [p.detach().clone() for p in net.parameters()]
    net(torch.randn(7, 5)).sum().backward()
    changed = [not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True)]
    assert changed == [False] * 4 + [True] * 2
    optimizer.step()
    assert all(not torch.equal(*pair) for pair in zip(net.parameters(), before, strict=True))


def test_neither_parameters_nor_moments_outlive_their_owner():
    """A hook that held the optimizer would be a circle that Python cannot see."""
    net = layers()
    optimizer = offload(net, 1)
    train(net, optimizer, steps=1)
    references = weakref.ref(optimizer), weakref.ref(net[1].weight)
    del optimizer
    gc.collect()
    assert references[0]() is None
    net(torch.randn(7, 5)).sum().backward()  # the hook has nothing to visit
    del net
    gc.collect()
    assert references[1]() is None


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
        norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])
        optimizer.step()
        yield loss.item(), norm.item()


# Without a compiler. The first keeps all of its last block, attention's output of the other one.
STEPS = {
    "fsdp2": replace(FULL_STEPS["fsdp2_selective"], compiles=False),
    "fsdp_compiled": replace(FULL_STEPS["fsdp_compiled"], compiles=False),
    "selective": FULL_STEPS["selective"],
    "offloaded": FULL_STEPS["offloaded"],
}


def losses_of(context):
    """First losses by the name of the step; each rank has two of the four sequences."""
    losses = {}
    for name, parts in STEPS.items():
        wrap = SHARDINGS[parts.sharding].wrap
        run = ShardedModel(parts, CONFIG, BATCH, context, wrap, plain=1, attentive=1)
        if parts.selects:
            run.keep({"qkv": 1, "h": 0, "ab": 2})
            assert [layer.keep for layer in run.net.layers] == [{"ab"}, {"qkv", "ab"}]
        assert run.tokens.shape == run.targets.shape == (2, BATCH.context_length)
        assert isinstance(run.optimizer, OffloadedAdamW)
        assert len(run.optimizer.blocks) == (1 if parts.offloads else 0)
        losses[name] = [(row["loss"], row["gradient_norm"]) for row in first_losses(run)]
        assert not allocator_retried(run)
    return losses


def test_sharded_steps_train_as_one_process_does():
    """Whatever shards, is kept, or is moved away: loss and norm of the gradient, step by step."""
    wanted = list(plain_losses())
    by_rank = launch(losses_of, 2, backend="gloo", timeout_s=300)
    for losses in by_rank:
        for name, rows in losses.items():
            torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=0, msg=name)


def test_moments_that_travel_are_the_blocks_matrices_and_the_heads_half_way():
    torch.manual_seed(0)
    net = build_model(replace(CONFIG, num_layers=4), 8)
    names = {p: name for name, p in net.named_parameters()}
    away = [[names[p] for p in block] for block in offloaded(net)]
    assert [len(block) for block in away] == [7, 8, 7]
    assert away[1][0] == "lm_head.weight"
    assert all(name.startswith("layers.1.") for name in away[0])
    assert not any("ln" in name or "layers.0." in name for block in away for name in block)


@pytest.mark.parametrize(
    ("room", "counts"),
    [
        (-5, {"ab": 0, "qkv": 0, "h": 0}),
        (39, {"ab": 1, "qkv": 0, "h": 1}),
        (100, {"ab": 3, "qkv": 0, "h": 1}),
        (180, {"ab": 3, "qkv": 3, "h": 2}),
        (1000, {"ab": 3, "qkv": 3, "h": 3}),
    ],
)
def test_memory_is_filled_with_the_largest_first(room, counts):
    assert fill(room, {"qkv": 25, "h": 7, "ab": 30}, layers=3) == counts


def test_first_blocks_are_checkpointed_then_attention_is_made_again():
    assert keep_fewer(5, 3) == (3, 3)
    assert keep_fewer(1, 3) == (0, 3)
    assert keep_fewer(0, 7) == (0, 3)
    assert keep_fewer(0, 3) == (0, 0)
