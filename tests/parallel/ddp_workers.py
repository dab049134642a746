"""Workers for test_ddp.py. Each asserts on every rank what it says in its docstring."""

import gc
import re
import time
import weakref
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cs336_systems.checks.ddp_checks import run_cases
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.parallel.adapters import TorchDDP

MB = 2**20
WRAPPERS = {
    "naive": (NaiveDDP, {}),
    "flat": (FlatDDP, {}),
    "overlapped": (OverlappedDDP, {}),
    "one bucket each": (BucketedDDP, {"bucket_size_mb": 1e-6}),
    "some buckets": (BucketedDDP, {"bucket_size_mb": 4e-4}),
    "one bucket": (BucketedDDP, {"bucket_size_mb": 100}),
}


def wrap(name, module):
    wrapper, arguments = WRAPPERS[name]
    return wrapper(module, **arguments)


def all_cases(context):
    """Every wrapper passes every case of check_ddp."""
    for name, (wrapper, arguments) in WRAPPERS.items():
        candidate = cloudpickle.dumps(partial(wrapper, **arguments))
        failures = run_cases(context, candidate, thorough=True)
        assert not failures, (name, failures)


def same_on_all_ranks(tensors):
    flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    return all(torch.equal(copy, copies[0]) for copy in copies)


def bitwise(context):
    """On numbers that float32 adds exactly in any order, nothing may differ from one process."""

    def whole_numbers(seed, *shape):
        generator = torch.Generator("cpu").manual_seed(seed)
        numbers = torch.randint(-4, 5, shape, generator=generator, device="cpu")
        return numbers.float().to(context.device)

    def model():
        layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
        for number, layer in enumerate(layers):
            layer.weight.data = whole_numbers(number, *layer.weight.shape) / 8
        return layers

    share, world_size = 4, context.world_size
    for name in WRAPPERS:
        for optimizer_class, settings, steps in (
            (torch.optim.SGD, {"lr": 2**-7}, 2),
            (torch.optim.AdamW, {"lr": 0.1}, 1),  # its step rounds, so only the first sees exact numbers
        ):
            alone, wrapped = model(), wrap(name, model())
            optimizers = [optimizer_class(m.parameters(), **settings) for m in (alone, wrapped)]
            for step in range(steps):
                inputs, targets = (whole_numbers(step + width, share * world_size, width) for width in (8, 4))
                mine = slice(context.rank * share, (context.rank + 1) * share)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                ((alone(inputs) * targets).sum() / (share * world_size)).backward()
                ((wrapped(inputs[mine]) * targets[mine]).sum() / share).backward()
                wrapped.finish_gradient_synchronization()
                for optimizer in optimizers:
                    optimizer.step()
                for expected, parameter in zip(alone.parameters(), wrapped.parameters(), strict=True):
                    assert torch.equal(parameter.grad, expected.grad), (name, step)
                    assert torch.equal(parameter, expected), (name, optimizer_class, step)


def transformer(context):
    """Tiny Transformer, three steps: the weights of one process on the whole batch, to rounding; replicas
    bitwise equal; and with two ranks, where sums have one order only, all wrappers bitwise equal."""
    config, share = model_size("tiny"), 2

    def build(seed):
        torch.manual_seed(seed)
        return build_model(config, context_length=16)

    def tokens(step):
        generator = torch.Generator("cpu").manual_seed(step)
        shape = (share * context.world_size, 17)
        ids = torch.randint(config.vocab_size, shape, generator=generator, device="cpu")
        return ids.to(context.device)

    def loss(model, ids):
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def train(model, rows):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, tokens(step)[rows]).backward()
            if hasattr(model, "finish_gradient_synchronization"):
                model.finish_gradient_synchronization()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    alone = train(build(seed=0), slice(None))
    mine = slice(context.rank * share, (context.rank + 1) * share)
    first = None
    for name in WRAPPERS:
        weights = train(wrap(name, build(seed=context.rank)), mine)
        assert same_on_all_ranks(weights), name
        first = first or weights
        for expected, weight, of_first in zip(alone, weights, first, strict=True):
            # AdamW turns the rounding of a gradient near zero into a difference of up to lr.
            assert (weight - expected).abs().mean() < 1e-5, name
            # On a GPU, the embedding's backward adds in any order.
            one_order = context.world_size <= 2 and context.device.type == "cpu"
            assert not one_order or torch.equal(weight, of_first), name


class OutOfOrder(nn.Module):
    """Runs its layers in an order of its own, which `order` says."""

    def __init__(self, layers=4, width=8, order=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.order = order or range(layers)

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


LAYER_MB = 8 * 8 * 4 / MB


def buckets(context):
    """Buckets respect their size, are stretches of one buffer, follow the order observed by rank 0, and the
    gradients are views into them, whichever way they are zeroed."""
    order = [2, 0, 3, 1] if context.rank == 0 else [1, 0, 2, 3]  # the ranks observe different orders
    torch.manual_seed(0)
    module = OutOfOrder(order=order)
    model = BucketedDDP(module, bucket_size_mb=2 * LAYER_MB)
    assert model._buckets == [[3, 2], [1, 0]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step < 2)
        kept = [parameter.grad for parameter in model.parameters()]
        own = OutOfOrder(order=order)
        own.load_state_dict(module.state_dict())
        inputs = torch.randn(3, 8)
        own(inputs).sum().backward()
        model(inputs).sum().backward()
        model.finish_gradient_synchronization()
        for parameter, of_own, before in zip(module.parameters(), own.parameters(), kept, strict=True):
            mean = of_own.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(parameter.grad, mean / context.world_size)
            assert step < 3 or parameter.grad is before  # added in place
        pointers = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert len(pointers) == 1
        assert model._buckets == [[1, 3], [0, 2]]
        if step > 0:
            for flat, bucket in zip(model._memory.buckets.values(), model._buckets, strict=True):
                gradients = [module.layers[index].weight.grad for index in bucket]
                assert torch.equal(flat, torch.cat([gradient.flatten() for gradient in gradients]))
        optimizer.step()
    assert same_on_all_ranks(model.parameters())


def bucket_sizes(context):
    """A bucket takes as many gradients as fit, at least one, and never mixes dtypes."""
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    module[1].to(torch.bfloat16), module[3].to(torch.bfloat16)
    for size_mb, expected in (
        (1e-9, [[4], [3], [2], [1], [0]]),
        (LAYER_MB, [[4], [2], [3, 1], [0]]),
        (2 * LAYER_MB, [[4, 2], [3, 1], [0]]),
        (1, [[3, 1], [4, 2, 0]]),
    ):
        model = BucketedDDP(module, bucket_size_mb=size_mb)
        assert model._buckets == expected, (size_mb, model._buckets)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, context.rank)
        model.finish_gradient_synchronization()
        for parameter in module.parameters():
            assert parameter.grad.dtype == parameter.dtype
            assert (parameter.grad == (context.world_size - 1) / 2).all()


def overlap(context):
    """What is sent while backward still runs, and that no_sync sends nothing."""
    events = []
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        events.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    def run(model, *, communicates=True):
        events.clear()
        model.zero_grad()
        loss = model(torch.randn(3, 8)).sum()
        if communicates:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
        events.append("backward is over")
        model.finish_gradient_synchronization()
        return list(events)

    dist.all_reduce = all_reduce
    try:
        weight, over, used = 64, "backward is over", 4
        for wrapper in (NaiveDDP, FlatDDP):
            sent = [4 * weight] if wrapper is FlatDDP else 4 * [weight]
            assert run(wrapper(OutOfOrder())) == [over, *sent, used]
        assert run(OverlappedDDP(OutOfOrder())) == [*4 * [weight], over, used]
        two_buckets = BucketedDDP(OutOfOrder(), bucket_size_mb=2 * LAYER_MB)
        assert run(two_buckets) == [2 * weight, 2 * weight, over, used]
        assert run(two_buckets, communicates=False) == [over, 2 * weight, 2 * weight, used]
        # An order that runs against the registration holds everything back, but only in the first step.
        backwards = OverlappedDDP(OutOfOrder(order=[3, 2, 1, 0]))
        sent = []
        third = backwards.module.layers[2].weight  # the third to be ready
        third.register_post_accumulate_grad_hook(lambda _: sent.append(len(events)))
        run(backwards)
        run(backwards)
        assert sent == [0, 3]
        # A checkpoint of the old kind runs a backward inside the backward: still one pass.
        nested = OverlappedDDP(Recomputed())
        assert run(nested) == run(nested) == [*4 * [weight], over, used]
    finally:
        dist.all_reduce = original


def late_use(context):
    """A layer that only the second of two passes uses, and there only on one rank, still counts."""
    for name in WRAPPERS:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = wrap(name, module)
        first, second = module
        inputs = torch.randn(3, 8)
        second(inputs).sum().backward()
        second(first(inputs) if context.rank == 1 else inputs).sum().backward()
        model.finish_gradient_synchronization()
        expected = torch.autograd.grad(second(first(inputs)).sum(), first.weight)[0]
        torch.testing.assert_close(first.weight.grad, expected / 2)


def passes_apart(context):
    """The passes of the ranks reach different layers, and the means are right all the same."""
    for name in WRAPPERS:
        module = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        model = wrap(name, module)
        for _ in range(2):  # first in the order of the parameters, then in the order observed
            model.zero_grad()
            for number in ((0, 0, 1), (0, 1, 2))[context.rank]:
                module[number](torch.ones(1, 2)).sum().backward()
            model.finish_gradient_synchronization()
            assert [layer.weight.grad.mean().item() for layer in module] == [1.5, 1, 0.5], name


def disagreement(context):
    """Ranks that wrap different things all get an error, and the group still works."""
    first = context.rank == 0
    frozen = nn.Linear(4, 4).requires_grad_(first)
    for make, words in (
        (lambda: NaiveDDP(nn.Linear(4, 4 + context.rank)), "weight (4, 4)"),
        (lambda: FlatDDP(nn.Linear(4, 4, bias=first)), "where rank 1 has 'nothing'"),
        (lambda: OverlappedDDP(nn.Linear(4, 4).to(torch.float32 if first else torch.float64)), "float64"),
        (lambda: OverlappedDDP(nn.Sequential(nn.Linear(4, 4)) if first else nn.Linear(4, 4)), "0.weight"),
        (lambda: NaiveDDP(frozen), "frozen"),
        (lambda: NaiveDDP(nn.BatchNorm1d(4) if first else nn.LayerNorm(4)), "'buffer running_mean (4,)"),
        (lambda: (NaiveDDP if first else FlatDDP)(nn.Linear(4, 4)), "'NaiveDDP' where rank 1 has 'FlatDDP'"),
        (lambda: BucketedDDP(nn.Linear(4, 4), bucket_size_mb=1 + context.rank), "buckets of"),
        (lambda: NaiveDDP(nn.Linear(4, 4).requires_grad_(False)), "no trainable parameter"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            make()
    dist.barrier()


def refusals(context):
    """Sparse gradients and parameters unfrozen after wrapping are errors, not silence."""
    for wrapper, arguments in WRAPPERS.values():
        model = wrapper(nn.Embedding(4, 2, sparse=True), **arguments)

        def train(model=model):
            model(torch.tensor([1])).sum().backward()
            model.finish_gradient_synchronization()

        with pytest.raises(TypeError, match="sparse"):
            train()
        dist.barrier()
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    model = OverlappedDDP(layers)
    layers[0].requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="frozen when wrapped"):
        model.finish_gradient_synchronization()


def odd_layouts(context):
    """Transposed weights, scalars, empty parameters, integer and boolean buffers."""
    for name in WRAPPERS:
        torch.manual_seed(context.rank)
        module = nn.Module()
        module.transposed = nn.Parameter(torch.randn(3, 5).T)
        module.scalar = nn.Parameter(torch.randn(()))
        module.empty = nn.Parameter(torch.empty(0, 3))
        module.register_buffer("count", torch.tensor(context.rank))
        module.register_buffer("flags", torch.tensor([context.rank == 0, False]))
        module.register_buffer("transposed_too", torch.randn(2, 3).T)
        model = wrap(name, module)
        assert module.count == 0
        assert module.flags[0]
        assert same_on_all_ranks([*module.parameters(), module.transposed_too])
        scale = torch.arange(15.0).view(5, 3)
        for _ in range(2):
            model.zero_grad()
            loss = (module.transposed * scale).sum() * (context.rank + 1) * module.scalar + module.empty.sum()
            loss.backward()
            if (
                name in ("naive", "flat") and context.rank == 0
            ):  # ranks may hold differently laid out gradients
                module.transposed.grad = module.transposed.grad.contiguous()
            model.finish_gradient_synchronization()
            mean = (context.world_size + 1) / 2
            weights = module.transposed.detach()
            torch.testing.assert_close(module.transposed.grad, mean * scale * module.scalar.detach())
            torch.testing.assert_close(module.scalar.grad, mean * (weights * scale).sum())


def garbage(context):
    """Deleting a wrapper and its module frees both, hooks and all; PyTorch's own too, which the benchmark
    runs in between."""
    torch_ddp = partial(TorchDDP, bucket_size_mb=25)
    for name in (*WRAPPERS, torch_ddp):
        module = nn.Linear(2, 2)
        model = torch_ddp(module) if name is torch_ddp else wrap(name, module)
        model(torch.ones(1, 2)).sum().backward()
        model.finish_gradient_synchronization()
        watched = [weakref.ref(thing) for thing in (model, module, module.weight)]
        del module, model
        gc.collect()
        assert not any(reference() for reference in watched), name


def no_copy(context):
    """The hooks do not keep autograd from handing its own tensor over as .grad."""
    model = OverlappedDDP(nn.Linear(8, 8, bias=False))
    seen = []
    model.module.weight.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    model(torch.randn(3, 8)).sum().backward()
    assert model.module.weight.grad.data_ptr() == seen[0]
    model.finish_gradient_synchronization()


ANY_WORLD_SIZE = [
    all_cases,
    bitwise,
    transformer,
    odd_layouts,
]
TWO_RANKS = [
    buckets,
    bucket_sizes,
    overlap,
    late_use,
    passes_apart,
    disagreement,
    refusals,
    garbage,
    no_copy,
]


def run_all(context):
    """One launch for all of them: starting processes takes longer than the checks."""
    torch.set_default_device(context.device)
    for worker in ANY_WORLD_SIZE + TWO_RANKS * (context.world_size == 2):
        start = time.perf_counter()
        worker(context)
        print(f"{worker.__name__}: {time.perf_counter() - start:.2f} s")


def one_rank_forgets(context, name):
    """All ranks run backward, and rank 0 alone asks for the means."""
    model = wrap(name, nn.Linear(4, 2, device=context.device))
    model(torch.ones(3, 4, device=context.device)).sum().backward()
    if context.rank == 0:
        model.finish_gradient_synchronization()
        if context.device.type == "cuda":  # until here the CPU has not waited
            torch.cuda.synchronize(context.device)
