"""Workers for test_guarantees.py: what autograd guarantees for a plain module, for a module in a wrapper."""

import contextlib
import copy
import dataclasses
import io
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cs336_systems.parallel import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlappedDDP,
    ReduceScatterDDP,
    ShardedOptimizer,
)

WIDTH = 6
DDP = {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP}
DDP |= {"bucketed": partial(BucketedDDP, bucket_size_mb=1e-4)}
BLOCKS = ("Block",)
SHARDED = {
    f"fsdp {units} {prefetch}": partial(FSDP, unit_types=units, prefetch=prefetch)
    for units in ((), BLOCKS)
    for prefetch in (0, 2)
}


def batch(rank, step=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Tensor


class Square(torch.autograd.Function):
    """x @ w.T, which keeps its weight by itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class Block(nn.Module):
    """Two layers whose results leave the block in different ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.a(x).tanh()
        if self.how == "dataclass":
            return Output(self.b(h), h)
        if self.how == "attribute":
            self.aux = self.b(h).square().mean()
            return h
        if self.how == "view":
            return self.b(h)[None].squeeze(0)
        if self.how == "checkpoint":
            return self.b(checkpoint(lambda y: self.b(y).tanh(), h, use_reentrant=False))
        if self.how == "generator":
            return (y for y in (self.b(h), h))
        if self.how == "functional":
            return Square.apply(h, self.b.weight) + self.b.bias
        return self.b(h)


class Net(nn.Module):
    def __init__(self, how, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.how, self.first, self.second = how, Block(how), Block(how)
        self.head = nn.Linear(WIDTH, 3)
        if how == "frozen":  # a part of a layer, and another layer
            self.first.a.weight.requires_grad_(False), self.second.b.requires_grad_(False)
        if how == "tied":
            self.second.a.weight = self.first.b.weight

    def forward(self, x):
        a, b = self.first(x), self.second(x)
        if self.how == "dataclass":
            return self.head(a.hidden * b.extra)
        if self.how == "attribute":
            return self.first.aux + self.second.aux  # the results themselves and the head have no part in it
        if self.how == "view":
            a = a.unsqueeze(0)[0]
            a += b
            a[:, :2] *= b[:, :2]
        if self.how == "generator":
            (a, _), (_, b) = a, b
        return self.head(a + b)


def rows(context, whole):
    n = -(-len(whole) // context.world_size)
    return whole[context.rank * n : (context.rank + 1) * n]


def assert_same_gradients(context, wrapped, alone, what):
    sharded = wrapped._sharded if isinstance(wrapped, FSDP) else ()
    for (name, mine), other in zip(wrapped.module.named_parameters(), alone.parameters(), strict=True):
        expected = rows(context, other.grad) if mine in sharded and other.grad is not None else other.grad
        if expected is None or mine.grad is None:
            assert mine.grad is expected, (what, name)
        else:
            torch.testing.assert_close(mine.grad, expected, msg=lambda text: f"{what}, {name}: {text}")  # noqa: B023


def both(context, alone, wrapped, loss=lambda y: y.square().mean(), **backward):
    for rank in range(context.world_size):
        (loss(alone(batch(rank))) / context.world_size).backward(**backward)
    loss(wrapped(batch(context.rank))).backward(**backward)


def backward_finds_its_weights(context):
    """Whatever way the results of a module take, and whoever keeps its weights."""
    ways = ("plain", "frozen", "tied", "dataclass", "attribute", "view", "checkpoint", "generator")
    for how in (*ways, "functional"):
        for name, wrap in (DDP | SHARDED).items():
            if how == "functional" and name.startswith("fsdp ()"):
                continue  # see `misuse_is_refused`
            alone, wrapped = Net(how), wrap(Net(how, seed=context.rank))
            for _ in range(2):
                both(context, alone, wrapped)
            wrapped.finish_gradient_synchronization()
            assert_same_gradients(context, wrapped, alone, (how, name))


def gradients_of_inputs_and_a_kept_graph(context):
    """autograd.grad for an input between two passes through one graph."""
    for name, wrap in SHARDED.items():
        alone, wrapped = Net("view"), wrap(Net("view"))
        x = batch(context.rank).requires_grad_()
        total = wrapped(x).square().mean()
        (found,) = torch.autograd.grad(total, x, retain_graph=True)
        (expected,) = torch.autograd.grad(alone(x).square().mean(), x)
        torch.testing.assert_close(found, expected, msg=name)
        total.backward(retain_graph=True)
        total.backward()
        for rank in range(context.world_size):
            (2 * alone(batch(rank)).square().mean() / context.world_size).backward()
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(context, wrapped, alone, name)


def in_autocast(context):
    """As one process in autocast, and no copy of a whole weight is kept, not even of a layer used twice."""
    for name, wrap in SHARDED.items():
        alone, wrapped = Net("checkpoint"), wrap(Net("checkpoint"))
        with torch.autocast("cpu", torch.bfloat16):
            both(context, alone, wrapped)
            y = wrap(Net("view"))(batch(context.rank))
        kept, nodes = [], [y.grad_fn]
        while nodes:
            node = nodes.pop()
            saved = [getattr(node, key) for key in dir(node) if key.startswith("_saved_")]
            kept += [t.untyped_storage().nbytes() for t in saved if isinstance(t, Tensor) and t.dim() == 2]
            nodes += [after for after, _ in node.next_functions if after is not None]
        assert kept.count(WIDTH * WIDTH * 2) == 0, name
        wrapped.finish_gradient_synchronization()
        for mine, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, rows(context, other.grad), rtol=0.05, atol=0.01, msg=name)


class Reads(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self, read):
        super().__init__()
        self.read, self.inner = read, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.read(self.inner, x)


READS = {
    "matmul": lambda layer, x: x @ layer.weight.T,
    "functional": lambda layer, x: F.linear(x, layer.weight, layer.bias),
    "a function of its own": lambda layer, x: Square.apply(x, layer.weight),
    "pointer": lambda layer, x: x + layer.weight.data_ptr(),
    "data": lambda layer, x: x * layer.weight.data.sum(),
    "penalty": lambda layer, x: layer(x) + layer.weight.square().sum(),
}


def misuse_is_refused(context):
    """Weights that are read while they are not gathered or are changed; what autograd would notice."""
    x = batch(context.rank)
    for name, read in READS.items():
        wrapped = FSDP(Reads(read))
        for mode in (torch.enable_grad, torch.no_grad):
            for call in (wrapped, wrapped.module):
                with (
                    mode(),
                    pytest.raises(RuntimeError, match=r"inner.(weight|bias) of an FSDP is used while"),
                ):
                    call(x)
        assert [*wrapped.parameters()] == [*wrapped.module.inner.parameters()], name
        assert FSDP(Reads(read), unit_types=("Reads",))(x).shape == (4, WIDTH) or name == "pointer"
    shape = FSDP(Reads(lambda layer, x: layer(x) * layer.weight.shape[0]))(x)
    assert shape.isfinite().all()  # its shape is that of the whole

    for units in ((), BLOCKS):
        wrapped = FSDP(Net("plain"), unit_types=units)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        wrapped(x).sum().backward()
        total = wrapped(x).sum()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation; allowed"):
            total.backward()
        wrapped.zero_grad()
        y = x.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="is to be differentiated; allowed"):
            torch.autograd.grad(wrapped(y).sum(), y, create_graph=True)
        wrapped.zero_grad()

    class Writes(Block):
        def forward(self, x):
            h = self.a(x).sigmoid()
            y = self.b(h)
            h.mul_(2)  # backward of sigmoid and of b needs what it was
            return y

    wrapped = FSDP(Writes("plain"), unit_types=("Writes",))
    with pytest.raises(RuntimeError, match=r"a tensor .*modified by an inplace operation"):
        wrapped(x).sum().backward()


def modules_that_change_are_refused(context):
    """Replaced, added, hooked, wrapped twice, copied: right, or a sentence."""
    for wrap in (DDP | SHARDED).values():
        for change in ("replaced", "added"):
            for steps in (0, 1):
                wrapped = wrap(Net("plain"))
                for _ in range(steps):
                    wrapped(batch(0)).sum().backward()
                    wrapped.finish_gradient_synchronization()
                    wrapped.zero_grad()
                if change == "replaced":
                    wrapped.module.head = nn.Linear(WIDTH, 2)
                else:
                    wrapped.module.register_parameter("more", nn.Parameter(torch.ones(2)))
                wrapped(batch(0)).sum().backward()
                with pytest.raises(RuntimeError, match="other parameters than when it was wrapped"):
                    wrapped.finish_gradient_synchronization()
        with pytest.raises(ValueError, match="wrapped already"):
            wrap(nn.Sequential(wrap(Net("plain"))))
        with torch.device("meta"):
            modules = Net("plain"), nn.BatchNorm1d(2)
        modules[1].weight, modules[1].bias = (nn.Parameter(torch.ones(2)) for _ in range(2))
        for module in (*modules, nn.Sequential(nn.LazyLinear(2))):
            with pytest.raises(ValueError, match=r"without values \(meta, or lazy\); allowed"):
                wrap(module)
    module = Net("plain")
    FSDP(module)
    for wrap in (FSDP, NaiveDDP):
        with pytest.raises(ValueError, match="wrapped already"):
            wrap(module)
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        module = Net("plain")
        getattr(module.head.weight, register)(lambda _: None)
        with pytest.raises(ValueError, match="has a hook that FSDP"):
            FSDP(module)
        wrapped = FSDP(Net("plain"))
        getattr(wrapped.module.head.weight, register)(lambda _: None)
        wrapped(batch(0)).sum().backward()
        with pytest.raises(ValueError, match="has a hook that FSDP"):
            wrapped.finish_gradient_synchronization()
    wrapped = FSDP(Net("plain"))
    optimizer = ShardedOptimizer(Net("plain").parameters(), torch.optim.AdamW)
    for thing in (wrapped, wrapped.module, optimizer):
        for take in (copy.copy, copy.deepcopy, lambda thing: torch.save(thing, io.BytesIO())):
            if (thing, take) != (wrapped.module, copy.copy):
                with pytest.raises(TypeError, match="cannot be copied or pickled; allowed"):
                    take(thing)


class Lamb(torch.optim.Optimizer):
    """Scales each update by the norm of the whole weight: no optimizer that anybody could list."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad * p.norm() / (p.grad.norm() + 1e-6)


class Centred(torch.optim.SGD):
    """Centralises gradients over the first dimension."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad - p.grad.mean(0)
        super().step()


def optimizers(context):
    """Those that look at more than one element are refused before they change anything; others are right."""
    for make in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, Lamb, Centred):
        wrapped = FSDP(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)))
        before = wrapped.module[0].weight.detach().clone()
        optimizer = make(wrapped.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = 0.0  # as a warm-up begins
        wrapped(batch(context.rank)).sum().backward()
        wrapped.finish_gradient_synchronization()
        with pytest.raises(ValueError, match="looks at more than one element"):
            optimizer.step(lambda: None) if make is torch.optim.LBFGS else optimizer.step()
        assert torch.equal(wrapped.module[0].weight, before)
    of = torch.optim
    makes = [of.SGD, of.Adam, of.AdamW, of.NAdam, of.RAdam, of.RMSprop, of.Adagrad, of.Adadelta, of.Adamax]
    for make in (*makes, of.ASGD, of.Rprop, partial(of.AdamW, fused=True), partial(of.Adam, amsgrad=True)):
        alone, wrapped = Net("plain"), FSDP(Net("plain"))
        pair = [make(model.parameters(), lr=0.01) for model in (alone, wrapped)]
        for _ in range(2):
            wrapped.zero_grad(), alone.zero_grad()
            both(context, alone, wrapped)
            wrapped.finish_gradient_synchronization()
            for optimizer in pair:
                optimizer.step()
        whole = wrapped.gather_full_parameters()
        for name, expected in alone.named_parameters():
            torch.testing.assert_close(whole[name], expected.detach(), rtol=1e-4, atol=1e-6, msg=str(make))


def infinities(context):
    """In the rows of one rank, even where another has no rows: a GradScaler skips the step on all ranks."""

    def scatter(module):
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        return ReduceScatterDDP(module, optimizer), optimizer

    def fsdp(module, **options):
        wrapped = FSDP(module, **options)
        return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)

    for make in (fsdp, partial(fsdp, compute_dtype=torch.float16), scatter):
        for bad in (torch.inf, torch.nan):
            for unscale in (False, True):
                torch.manual_seed(0)
                module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1, bias=False))
                wrapped, optimizer = make(module)
                before = [p.detach().clone() for p in module.parameters()]
                scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
                for number in range(3):
                    wrapped.zero_grad()
                    y = wrapped(torch.ones(1, 2))
                    scaler.scale(y.float().sum() * (bad if number == 0 else 1)).backward()
                    wrapped.finish_gradient_synchronization()
                    if number == 0 and make is fsdp and context.rank == 1:  # rank 0 has all rows of it
                        assert module[1].weight.grad.numel() == 0
                    if unscale:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    same = all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
                    assert (scaler.get_scale(), same) == (2.0, number == 0)


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            raise MemoryError("out of memory")
        return grad, None


class Fragile(Net):
    def forward(self, x, where=""):
        h = self.first(x)
        if where == "forward":
            raise MemoryError("out of memory")
        return self.head(self.second(Bomb.apply(h, where == "backward")))


def failed_batches(context):
    """Skipped after zero_grad of the wrapper or of the optimizer: as if they had not been."""
    plan = ["", "backward", "", "forward", "backward", "backward", ""]
    for name, wrap in (DDP | SHARDED).items():
        for clear in ("wrapper", "wrapper, to zero", "optimizer", "optimizer, to zero"):
            alone, wrapped = Fragile("plain"), wrap(Fragile("plain"))
            pair = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (alone, wrapped)]
            refused = False
            for step, where in enumerate(plan):
                who = wrapped if clear.startswith("wrapper") else pair[1]
                who.zero_grad(set_to_none="zero" not in clear)
                pair[0].zero_grad()
                try:
                    with contextlib.suppress(MemoryError):
                        wrapped(batch(context.rank, step), where).square().mean().backward()
                        wrapped.finish_gradient_synchronization()
                        pair[1].step()
                except RuntimeError as error:
                    assert "has raised an error" in str(error)  # noqa: PT017
                    refused = True
                    break
                if not where:
                    for rank in range(context.world_size):
                        (alone(batch(rank, step)).square().mean() / context.world_size).backward()
                    pair[0].step()
            # Zeros of an optimizer may be written to by what is under way.
            assert refused == (clear == "optimizer, to zero" and name not in ("naive", "flat")), (name, clear)
            if refused:
                continue
            whole = (
                wrapped.gather_full_parameters() if isinstance(wrapped, FSDP) else wrapped.module.state_dict()
            )
            for key, expected in alone.named_parameters():
                torch.testing.assert_close(whole[key], expected.detach(), msg=f"{name} {clear} {key}")


def small_ranges_and_lazy_views(context):
    """Means of float16 whose sum overflows, and gradients that are lazily conjugated or negated."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat))

        def forward(self, x):
            return (self.w.mH @ x.to(torch.cfloat)).imag.square().sum() + self.w.conj().imag.sum()

    wrappers = DDP | {
        "scatter": lambda m: ReduceScatterDDP(m, ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=0.1))
    }
    for name, wrap in wrappers.items():
        alone, wrapped = Lazy(), wrap(Lazy())
        for rank in range(context.world_size):
            (alone(batch(rank)[:3]) / context.world_size).backward()
        wrapped(batch(context.rank)[:3]).backward()
        wrapped.finish_gradient_synchronization()
        if wrapped.module.w.grad is not None:
            torch.testing.assert_close(wrapped.module.w.grad, alone.w.grad.resolve_conj(), msg=name)
    wrappers |= {"fsdp": FSDP, "fsdp of float32": partial(FSDP, compute_dtype=torch.float16)}
    for name, wrap in wrappers.items():
        for dtype in (torch.float16, torch.bfloat16):
            whole = torch.float32 if "float32" in name else dtype
            wrapped = wrap(nn.Linear(4, 4, bias=False, dtype=whole))
            y = wrapped(torch.full((1, 4), 100, dtype=whole))
            y.backward(torch.full_like(y, 320))
            wrapped.finish_gradient_synchronization()
            gradient = wrapped.module.weight.grad
            assert gradient is None or (gradient == 32000).all(), (name, dtype)


CHECKS = [backward_finds_its_weights, gradients_of_inputs_and_a_kept_graph, in_autocast, misuse_is_refused]
CHECKS += [modules_that_change_are_refused, optimizers, infinities, failed_batches]
CHECKS += [small_ranges_and_lazy_views]


def run(context, number):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Lazy modules are a new feature")
    CHECKS[number](context)
    dist.barrier()
