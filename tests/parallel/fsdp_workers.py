"""Workers for test_fsdp.py. Each asserts on every rank what it says in its docstring."""

import copy
import gc
import os
import re
import warnings
import weakref
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cs336_systems.checks.fsdp_checks import properties
from cs336_systems.checks.on_ranks import try_properties
from cs336_systems.configs import model_size
from cs336_systems.measure.collective_calls import watch_collectives
from cs336_systems.model import Linear, build_model
from cs336_systems.parallel import FSDP
from cs336_systems.training.checkpointing import forward_with, strategy

BLOCKS = {"unit_types": ("TransformerBlock",)}
UNITS = {
    "weights": {},
    "weights, nothing ahead": {"prefetch": 0},
    "blocks": BLOCKS,
    "blocks, one ahead": BLOCKS | {"prefetch": 1},
    "halves of blocks": {"unit_types": ("CausalSelfAttention", "SwiGLU"), "prefetch": 1},
}
VOCABULARY, LENGTH = 512, 8


def tiny(seed=0):
    torch.manual_seed(seed)
    return build_model(model_size("tiny"), LENGTH)


def below_7(seed, *shape):
    """Integers that are the same on all ranks and devices."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(7, shape, generator=generator, device="cpu").to(torch.get_default_device())


def batch(step, share, world_size):
    generator = torch.Generator("cpu").manual_seed(step)
    shape = (2, share * world_size, LENGTH)
    return torch.randint(VOCABULARY, shape, generator=generator, device="cpu").to(torch.get_default_device())


def train_both(context, alone, wrapped, *, steps=3, call=nn.Module.__call__, passes=1, max_norm=None):
    """SGD on the whole batch, and on this rank's share of it: the weights have to be the same."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, wrapped)]
    share = 2
    mine = slice(share * context.rank, share * (context.rank + 1))
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(passes):
            tokens, targets = batch(10 * step + number, share, context.world_size)
            F.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten()).backward()
            loss = F.cross_entropy(call(wrapped, tokens[mine]).flatten(0, 1), targets[mine].flatten())
            loss.backward()
        wrapped.finish_gradient_synchronization()
        if max_norm:
            norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
            torch.testing.assert_close(wrapped.clip_grad_norm_(max_norm), norm, rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    whole = wrapped.gather_full_parameters()
    for name, expected in alone.named_parameters():
        torch.testing.assert_close(whole[name], expected.detach(), rtol=1e-4, atol=1e-6, msg=name)


def every_property_of_the_checker(context):
    """FSDP passes check_fsdp at its most thorough, for every kind of group."""
    for options in ({}, {"unit_types": ("Toy",)}):
        asked = cloudpickle.dumps((partial(FSDP, **options), partial(properties, thorough=True)))
        assert try_properties(context, asked) == [], options


def recomputation(context):
    """Checkpointed blocks and segments gather again what they compute again."""

    def call(plan):
        return lambda model, tokens: forward_with(model.module, strategy(plan), tokens)

    for options in (UNITS["weights"], UNITS["blocks, one ahead"]):
        for plan in ("every 1", "every 2", "recursive"):
            wrapped = FSDP(tiny(context.rank), **options)
            train_both(context, tiny(), wrapped, call=call(plan), steps=2, max_norm=0.5)
    train_both(context, tiny(), FSDP(tiny(), **UNITS["halves of blocks"]), call=call("half blocks"), steps=2)
    whole = partial(checkpoint, use_reentrant=False)
    train_both(context, tiny(), FSDP(tiny(), **BLOCKS), call=whole, steps=2)


class Pair(nn.Module):
    """Two layers in one module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(LENGTH, 6), Linear(6, LENGTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's compiler looks at .grad of what has none
        for step in range(2):
            inputs = below_7(step, 2, LENGTH).float()
            for model in (alone, wrapped):
                model.zero_grad()
                model(inputs).square().sum().backward()
            wrapped.finish_gradient_synchronization()
            for parameter in (*alone.parameters(), *wrapped.parameters()):
                parameter.data -= 0.01 * parameter.grad
    whole = wrapped.gather_full_parameters()
    for name, expected in alone.named_parameters():
        torch.testing.assert_close(whole[name], expected.detach(), msg=name)


def compute_dtype(context):
    """Weights travel and compute in bfloat16; what the optimizer sees stays float32, and learns."""
    for options in UNITS.values():
        wrapped = FSDP(tiny(), torch.bfloat16, **options)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
        tokens, targets = batch(context.rank, 2, 1)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            with watch_collectives() as messages:
                logits = wrapped(tokens)
                losses.append(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))
                losses[-1].backward()
            wrapped.finish_gradient_synchronization()
            optimizer.step()
        assert logits.dtype == torch.bfloat16
        assert {message.dtype for message in messages} == {"bfloat16"}
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in wrapped.parameters())
        assert losses[-1] < 0.5 * losses[0]
    wrapped = FSDP(Linear(64, 64, dtype=torch.float16))
    (weight,) = wrapped.parameters()
    weight.grad = torch.full_like(weight, 10)  # float16 cannot hold the square of the norm
    assert wrapped.clip_grad_norm_(64).item() == pytest.approx(640, rel=1e-3)
    torch.testing.assert_close(weight.grad, torch.ones_like(weight), rtol=1e-2, atol=0)


def schedule(context):
    """Each group is gathered in forward and, but for the last, in backward; few are whole at once."""
    tokens, _ = batch(0, 2, 1)
    for ahead, name in ((2, "weights"), (0, "weights, nothing ahead"), (1, "blocks, one ahead")):
        wrapped, held = FSDP(tiny(), **UNITS[name]), []
        groups = wrapped._groups

        def count(*_, groups=groups, held=held):
            held.append(sum(group._memory.nbytes() > 0 for group in groups))

        for module in wrapped.module.modules():
            module.register_forward_hook(count)
        for group in groups:
            for weight in group.weights:
                weight.whole.register_hook(count)
        for _ in range(2):  # the order is known from the first
            held.clear()
            with watch_collectives() as messages:
                wrapped(tokens).sum().backward()
            wrapped.finish_gradient_synchronization()
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
    """A forward without a backward, or an optimizer that gives parameters new memory: nothing is stale."""
    wrapped = FSDP(nn.Sequential(Linear(4, 4), Linear(4, 4)))
    inputs = torch.ones(1, 4)
    wrapped(inputs).sum().backward()
    wrapped.finish_gradient_synchronization()
    for _ in range(2):
        wrapped(inputs)
        expected = inputs
        for weight in wrapped.gather_full_parameters().values():
            expected = expected @ (2 * weight).T
        for parameter in wrapped.parameters():
            parameter.data = parameter.data * 2
        torch.testing.assert_close(wrapped(inputs), expected)


def failures(context):
    """After a forward that raises, the next works and finds the shards in place."""
    wrapped = FSDP(tiny(), **BLOCKS)
    wrapped(batch(0, 1, 1)[0])
    with pytest.raises(ValueError, match="at most"):
        wrapped(torch.zeros(1, LENGTH + 1, dtype=torch.long))

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Linear(4, 4)

        def forward(self, x):
            raise KeyError("oh")

    module = Breaks()
    wrapped = FSDP(module, unit_types=(Breaks,))
    for _ in range(2):
        with pytest.raises(KeyError, match="oh"):
            wrapped(torch.ones(1, 4))
        assert module.inner.weight is next(wrapped.parameters())
        assert wrapped._groups[0]._memory.nbytes() == 0


def disagreement(context):
    """Ranks that wrap or run different things all get an error, and the group still works."""
    first = context.rank == 0
    for make, words in (
        (lambda: FSDP(nn.Linear(4, 4 + context.rank)), "weight (4, 4)"),
        (lambda: FSDP(nn.Linear(4, 4), torch.bfloat16 if first else None), "compute_dtype torch.bfloat16"),
        (lambda: FSDP(nn.LayerNorm(4)), "LayerNorm has nothing to shard; allowed: a module with"),
        (lambda: FSDP(nn.Linear(4, 4).requires_grad_(False)), "no trainable parameter"),
        (lambda: FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())), "torch.float16 and torch.fl"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            make()
    layers = nn.ModuleList([Linear(4, 4), Linear(4, 4)])
    FSDP(layers)
    with pytest.raises(ValueError, match="rank 0 has 'gather 0' where rank 1 has 'gather 1'"):
        layers[context.rank](torch.ones(1, 4))
    layers = nn.ModuleList([Linear(4, 4), Linear(4, 4)])
    wrapped = FSDP(layers)
    outputs = [layer(torch.ones(1, 4)) for layer in layers]
    with pytest.raises(ValueError, match="the ranks diverge"):
        sum(outputs[: 2 - context.rank]).sum().backward(), wrapped.finish_gradient_synchronization()
    dist.barrier()


def refusals(context):
    """Sparse gradients, and weights frozen, cast or assigned after wrapping: errors, not silence."""
    wrapped = FSDP(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(TypeError, match="sparse"):
        wrapped(torch.tensor([1])).sum().backward()
    wrapped = FSDP(nn.Linear(2, 2))
    next(wrapped.parameters()).requires_grad_(False)
    wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="frozen or unfrozen"):
        wrapped.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match=r"wrapped, torch\.float32 on"):
        wrapped.to(torch.bfloat16)
    with pytest.raises(ValueError, match="assign is True; allowed: False"):
        wrapped.load_state_dict(wrapped.state_dict(), assign=True)
    before = [x.clone() for x in wrapped.to(context.device).parameters()]
    wrapped.load_state_dict({name: x + 1 for name, x in wrapped.state_dict().items()})
    for x, old in zip(wrapped.parameters(), before, strict=True):
        assert torch.equal(x, old + 1)


def garbage(context):
    """Deleting a wrapper and its module frees both, hooks and all."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = FSDP(module)
    model(torch.ones(1, 2)).sum().backward()
    model.finish_gradient_synchronization()
    watched = [weakref.ref(thing) for thing in (model, module, module[0].weight, model._groups[0])]
    del module, model
    gc.collect()
    assert not any(reference() for reference in watched)


def on_gpus(context):
    """A step holds a few units and its shards, no more, and messages run beside kernels."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.set_device(context.device)
    width, depth = 2048, 12
    layer = width * width * 4  # bytes
    with context.device:
        module = nn.Sequential(*(Linear(width, width) for _ in range(depth)))
        inputs = torch.randn(4096, width)
    wrapped = FSDP(module, prefetch=1)
    gc.collect()
    before = torch.cuda.memory_allocated(context.device)
    assert before < layer * depth / context.world_size + inputs.nbytes + layer
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)

    def step():
        optimizer.zero_grad()
        with torch.no_grad():
            wrapped(inputs)
        wrapped(inputs).square().mean().backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(context.device)
    with torch.no_grad():
        wrapped(inputs)
    activations = 4 * inputs.nbytes
    gradients = layer * depth / context.world_size
    assert torch.cuda.max_memory_allocated() < before + gradients + activations + 3 * layer
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    spans = {"nccl": [], "other": []}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = "nccl" if "nccl" in event.name.lower() else "other"
            spans[kind].append((event.time_range.start, event.time_range.end))
    hidden = [
        any(start < other_end and other_start < end for other_start, other_end in spans["other"])
        for start, end in spans["nccl"]
    ]
    assert len(hidden) >= 3 * depth - 1
    assert sum(hidden) > 0.6 * len(hidden)


ANY_WORLD_SIZE = [every_property_of_the_checker]
TWO_RANKS = [compute_dtype, schedule, recomputation, compiled, stale_weights, failures]
TWO_RANKS += [disagreement, refusals, garbage]


def run_all(context):
    """One launch for all of them: starting processes takes longer than the checks."""
    warnings.simplefilter("error")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True)
    torch.set_default_device(context.device)
    for worker in ANY_WORLD_SIZE + TWO_RANKS * (context.world_size == 2):
        print(worker.__name__)
        worker(context)
