"""What autograd and PyTorch's optimizers guarantee holds under every wrapper, or is refused in a sentence.

Checks are run by `wrappers.run`; each asserts on every rank what it says in its docstring.
"""

import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import re
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from wrappers import (
    ALL,
    DDP,
    FSDPS,
    backward,
    one_pass,
    run,
    same_gradients,
    same_weights,
    scattered,
    train,
)

from cs336_systems.model import Linear
from cs336_systems.parallel import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    ShardedOptimizer,
    TorchDDP,
    launch,
)

WIDTH = 6


def batch(rank, step=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, rank, step=0):
    return model(batch(rank, step)).square().mean()


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


def keep_as_attribute(block, h):
    block.aux = block.b(h).square().mean()
    return h


RESULTS = {  # the ways in which the results of a block's second layer leave it
    "dataclass": lambda block, h: Output(block.b(h), h),
    "attribute": keep_as_attribute,
    "view": lambda block, h: block.b(h)[None].squeeze(0),
    "checkpoint": lambda block, h: block.b(
        checkpoint(lambda y: block.b(y).tanh(), h, use_reentrant=False)
    ),
    "generator": lambda block, h: (y for y in (block.b(h), h)),
    "functional": lambda block, h: Square.apply(h, block.b.weight) + block.b.bias,
}
WAYS = ("plain", "frozen", "tied", *RESULTS)


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.a(x).tanh()
        return RESULTS[self.how](self, h) if self.how in RESULTS else self.b(h)


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
            return (
                self.first.aux + self.second.aux
            )  # the results themselves and the head have no part in it
        if self.how == "view":
            a = a.unsqueeze(0)[0]
            a += b
            a[:, :2] *= b[:, :2]
        if self.how == "generator":
            (a, _), (_, b) = a, b
        return self.head(a + b)


def backward_finds_its_weights(context):
    """Whatever way the results of a module take, and whoever keeps its weights."""
    for how, (name, wrap) in itertools.product(WAYS, ALL.items()):
        if how == "functional" and name.startswith("fsdp ()"):
            continue  # a block reads a weight that is gathered by itself
        alone, wrapped = Net(how), wrap(Net(how, seed=context.rank))
        for _ in range(2):
            backward(context, alone, wrapped, loss_of)
        wrapped.finish_gradient_synchronization()
        same_gradients(context, wrapped, alone, (how, name))


def gradients_of_inputs_and_a_kept_graph(context):
    """autograd.grad for an input between two passes through one graph."""
    for name, wrap in FSDPS.items():
        alone, wrapped, x = Net("view"), wrap(Net("view")), batch(context.rank).requires_grad_()
        total = wrapped(x).square().mean()
        (found,) = torch.autograd.grad(total, x, retain_graph=True)
        (expected,) = torch.autograd.grad(alone(x).square().mean(), x)
        torch.testing.assert_close(found, expected, msg=name)
        total.backward(retain_graph=True), total.backward()
        for rank in range(context.world_size):
            (2 * loss_of(alone, rank) / context.world_size).backward()
        wrapped.finish_gradient_synchronization()
        same_gradients(context, wrapped, alone, name)


def in_autocast(context):
    """As one process in autocast, and no copy of a whole weight is kept, not even of a layer used twice."""
    for name, wrap in FSDPS.items():
        alone, wrapped = Net("checkpoint"), wrap(Net("checkpoint"))
        with torch.autocast("cpu", torch.bfloat16):
            backward(context, alone, wrapped, loss_of)
            y = wrap(Net("view"))(batch(context.rank))
        kept, nodes = [], [y.grad_fn]
        while nodes:
            node = nodes.pop()
            saved = [getattr(node, key) for key in dir(node) if key.startswith("_saved_")]
            kept += [
                t.untyped_storage().nbytes()
                for t in saved
                if isinstance(t, Tensor) and t.dim() == 2
            ]
            nodes += [after for after, _ in node.next_functions if after is not None]
        assert kept.count(WIDTH * WIDTH * 2) == 0, name
        wrapped.finish_gradient_synchronization()
        same_gradients(context, wrapped, alone, name, rtol=0.05, atol=0.01)


def misuse_is_refused(context):
    """Weights that are changed between forward and backward, and whatever else autograd would notice."""
    x = batch(context.rank)
    for units in ((), ("Block",)):
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


CHANGES = [  # of a module, and what is said of them
    ("other parameters than when it", lambda net: setattr(net, "head", nn.Linear(WIDTH, 2))),
    (
        "other parameters than when it",
        lambda net: net.register_parameter("v", nn.Parameter(torch.ones(2))),
    ),
    ("frozen when wrapped", lambda net: net.first.a.weight.requires_grad_(True)),
]
HOOK = ("has a hook that FSDP", lambda net: net.head.weight.register_hook(id))
CHANGES_OF_FSDP = [("was frozen since", lambda net: net.head.weight.requires_grad_(False)), HOOK]


def modules_that_are_refused(context):
    """Wrapped already, without values, hooked under FSDP; sparse gradients, before anything is sent."""
    with torch.device("meta"):
        empty = [Net("plain"), nn.BatchNorm1d(2), nn.Sequential(nn.LazyLinear(2, device="cpu"))]
    empty[1].weight, empty[1].bias = (nn.Parameter(torch.ones(2)) for _ in range(2))
    for wrap in ALL.values():
        with pytest.raises(ValueError, match="wrapped already"):
            wrap(nn.Sequential(wrap(Net("plain"))))
        with pytest.raises(ValueError, match="wrapped already"):
            wrap(FSDP(Net("plain")).module)
        for module in empty:
            with pytest.raises(ValueError, match=r"without values \(meta, or lazy\); allowed"):
                wrap(module)
        with pytest.raises(TypeError, match="sparse"):
            one_pass(wrap(nn.Embedding(4, 2, sparse=True)), torch.tensor([1]))
        dist.barrier()
    HOOK[1](module := Net("plain"))
    with pytest.raises(ValueError, match=HOOK[0]):
        FSDP(module)


def modules_that_change(context):
    """After wrapping, before the first step or later: it is noticed."""
    for (name, wrap), steps in itertools.product(ALL.items(), (0, 1)):
        for words, change in CHANGES + CHANGES_OF_FSDP * name.startswith("fsdp"):
            wrapped = wrap(Net("frozen"))
            for _ in range(steps):
                one_pass(wrapped, batch(0))
                wrapped.zero_grad()
            change(wrapped.module)
            with pytest.raises((RuntimeError, ValueError), match=words):
                one_pass(wrapped, batch(0))


def copies_and_casts(context):
    """Only a module before it is wrapped, and values: neither shards nor what knows of them."""
    wrapped = FSDP(nn.Linear(2, 2))
    optimizer = ShardedOptimizer(Net("plain").parameters(), torch.optim.AdamW)
    for thing in (wrapped, wrapped.module, optimizer):
        for take in (copy.copy, copy.deepcopy, lambda thing: torch.save(thing, io.BytesIO())):
            if (thing, take) != (wrapped.module, copy.copy):
                with pytest.raises(TypeError, match="cannot be copied or pickled; allowed"):
                    take(thing)
    with pytest.raises(RuntimeError, match=r"wrapped, torch\.float32 on"):
        wrapped.to(torch.bfloat16)
    with pytest.raises(ValueError, match="assign is True; allowed: False"):
        wrapped.load_state_dict(wrapped.state_dict(), assign=True)
    raised = {name: x + 1 for name, x in wrapped.to(context.device).state_dict().items()}
    wrapped.load_state_dict(raised)
    assert all(torch.equal(x, raised[name]) for name, x in wrapped.named_parameters())


class OwnMuon(torch.optim.Muon):
    """A subclass is refused like its class."""


def optimizers(context):
    """Those that look at more than one element are refused before they change anything; others are right."""
    for make in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, OwnMuon):
        wrapped = FSDP(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)))
        before = wrapped.module[0].weight.detach().clone()
        optimizer = make(wrapped.parameters(), lr=0.1)
        one_pass(wrapped, batch(context.rank))
        with pytest.raises(ValueError, match=f"{make.__name__} looks at more than one element"):
            optimizer.step(lambda: None) if make is torch.optim.LBFGS else optimizer.step()
        assert torch.equal(wrapped.module[0].weight, before)
    of = torch.optim
    makes = [
        of.SGD,
        of.Adam,
        of.AdamW,
        of.NAdam,
        of.RAdam,
        of.RMSprop,
        of.Adagrad,
        of.Adadelta,
        of.Adamax,
    ]
    makes += [of.ASGD, of.Rprop, partial(of.AdamW, fused=True), partial(of.Adam, amsgrad=True)]
    for make in makes:
        train(context, Net("plain"), FSDP(Net("plain")), loss_of, make, make=partial(make, lr=0.01))


class Apart(nn.Module):
    """Two layers, one beside the other; `factor` is in the gradient of the second's first row alone."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, rows, bias=False)

    def forward(self, x, factor):
        return self.first(x).sum() + factor * self.second(torch.ones(1, 4))[0, 0]


def infinities(context):
    """In the rows of one rank, where another may have none: a GradScaler skips the step on all ranks.

    Where all have rows or a gradient of their own, that is so after all other gradients were cleaned, too.
    """
    wraps = FSDP, partial(FSDP, compute_dtype=torch.float16), scattered
    for wrap, bad, then in itertools.product(
        wraps, (torch.inf, torch.nan), ("", "unscale", "clean")
    ):
        module = Apart(rows=4 if then == "clean" else 1)
        wrapped, scaler = wrap(module), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = getattr(wrapped, "_optimizer", None) or torch.optim.SGD(
            wrapped.parameters(), lr=0.1
        )
        before = [p.detach().clone() for p in module.parameters()]
        for number in range(3):
            wrapped.zero_grad()
            loss = wrapped(torch.ones(1, 2), bad if number == 0 else 1.0)
            scaler.scale(loss.float()).backward()
            wrapped.finish_gradient_synchronization()
            if then == "unscale":
                scaler.unscale_(optimizer)
            for parameter in module.first.parameters() if then == "clean" else ():
                parameter.grad = None if parameter.grad is None else parameter.grad.nan_to_num()
            scaler.step(optimizer)
            scaler.update()
            same = all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
            assert (scaler.get_scale(), same) == (2.0, number == 0), (wrap, bad, then)


def run_out_of_memory(_):
    raise MemoryError("out of memory")


class Fragile(Net):
    def forward(self, x, where=""):
        h = self.first(x)
        if where == "backward":
            h.register_hook(run_out_of_memory)
        return self.head(self.second("no tensor" if where == "forward" else h))


def failed_batches(context):
    """Skipped after zero_grad of the wrapper or of the optimizer: as if they had not been."""
    plan = ["", "backward", "", "forward", "backward", "backward", ""]
    ways = ("wrapper", "wrapper, to zero", "optimizer", "optimizer, to zero")
    for (name, wrap), clear in itertools.product(ALL.items(), ways):
        alone, wrapped, refused = Fragile("plain"), wrap(Fragile("plain")), False
        pair = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (alone, wrapped)]
        for step, where in enumerate(plan):
            who = wrapped if clear.startswith("wrapper") else pair[1]
            who.zero_grad(set_to_none="zero" not in clear)
            pair[0].zero_grad()
            try:
                with contextlib.suppress(MemoryError, TypeError):
                    wrapped(batch(context.rank, step), where).square().mean().backward()
                    wrapped.finish_gradient_synchronization()
                    pair[1].step()
            except RuntimeError as error:
                assert "has raised an error" in str(error)  # noqa: PT017
                refused = True
                break
            found, given = wrapped.parameters(), pair[1].param_groups[0]["params"]
            assert where == "backward" or [*map(id, found)] == [*map(id, given)]
            assert not any(group.calls for group in getattr(wrapped, "_groups", ())), name
            if not where:
                for rank in range(context.world_size):
                    (loss_of(alone, rank, step) / context.world_size).backward()
                pair[0].step()
        # Zeros of an optimizer may be written to by what is under way.
        assert refused == (clear == "optimizer, to zero" and name not in ("naive", "flat")), (
            name,
            clear,
        )
        if not refused:
            same_weights(wrapped, alone, (name, clear), rtol=1.3e-6, atol=1e-5)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = (
            nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat)),
            nn.Parameter(torch.randn(3)),
        )

    def forward(self, x):  # a gradient that is added to another, or multiplied, would not be lazy
        negated = torch.complex(torch.zeros(3), self.v).conj().imag
        return (self.w.mH @ x.to(torch.cfloat)).abs().square().sum() + (x[0, :3] * negated).sum()


def lazy_views_and_small_ranges(context):
    """Gradients that are lazily conjugated or negated; means of float16 where the checkers do not look."""
    for name, wrap in (DDP | {"scatter": scattered}).items():
        alone, wrapped = Lazy(), wrap(Lazy())
        backward(context, alone, wrapped, lambda model, rank: model(batch(rank)[:3]))
        wrapped.finish_gradient_synchronization()
        for mine, other in zip(wrapped.module.parameters(), alone.parameters(), strict=True):
            if mine.grad is not None:
                torch.testing.assert_close(
                    mine.grad, other.grad.resolve_conj().resolve_neg(), msg=name
                )
    for wrap in (scattered, partial(FSDP, compute_dtype=torch.float16)):
        wrapped = wrap(
            nn.Linear(4, 4, bias=False, dtype=torch.float16 if wrap is scattered else None)
        )
        one_pass(wrapped, torch.full((1, 4), 40_000, dtype=torch.float16))
        gradient = wrapped.module.weight.grad
        assert gradient is None or (gradient == 40_000).all()


def disagreement(context):
    """Ranks that wrap or run different things all get an error, and the group still works."""
    first = context.rank == 0

    def mixed():
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())

    for make, words in (
        (lambda: NaiveDDP(nn.Linear(4, 4 + context.rank)), "weight (4, 4)"),
        (lambda: FlatDDP(nn.Linear(4, 4, bias=first)), "rank 1 has 'nothing'"),
        (lambda: NaiveDDP(nn.Linear(4, 4).requires_grad_(first)), "without gradient"),
        (lambda: NaiveDDP(nn.BatchNorm1d(4) if first else nn.LayerNorm(4)), "'running_mean (4,)"),
        (lambda: (NaiveDDP if first else FlatDDP)(nn.Linear(4, 4)), "'FlatDDP'"),
        (lambda: BucketedDDP(nn.Linear(4, 4), bucket_size_mb=1 + context.rank), "buckets of"),
        (lambda: NaiveDDP(nn.Linear(4, 4).requires_grad_(False)), "no trainable parameter"),
        (lambda: FSDP(nn.Linear(4, 4 + context.rank)), "weight (4, 4)"),
        (
            lambda: FSDP(nn.Linear(4, 4), torch.bfloat16 if first else None),
            "compute_dtype torch.bfloat16",
        ),
        (
            lambda: FSDP(nn.LayerNorm(4)),
            "LayerNorm has nothing to shard; allowed: a trainable parameter in",
        ),
        (lambda: FSDP(nn.Linear(4, 4).requires_grad_(False)), "no trainable parameter"),
        (lambda: FSDP(mixed()), "torch.float16 and torch.fl"),
        (lambda: FSDP(mixed(), prefetch=3), "prefetch is 3; allowed"),
        (lambda: FSDP(mixed(), prefetch=None), "prefetch is None; allowed"),
        (lambda: FSDP(mixed(), torch.int8), "compute_dtype is torch.int8; allowed"),
        (lambda: FSDP(mixed(), "bfloat16"), "compute_dtype is 'bfloat16'; allowed"),
        *(
            (partial(BucketedDDP, mixed(), size), "bucket_size_mb is")
            for size in (0, float("nan"), "25")
        ),
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


def garbage(context):
    """Deleting a wrapper and its module frees both, hooks and all; PyTorch's own too."""
    for name, wrap in (ALL | {"torch": partial(TorchDDP, bucket_size_mb=25)}).items():
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = wrap(module)
        one_pass(model, torch.ones(1, 2))
        groups = vars(model).get("_groups", ())
        watched = [weakref.ref(each) for each in (model, module, module[0].weight, *groups)]
        del module, model, groups
        gc.collect()
        assert not any(reference() for reference in watched), name


CHECKS = [
    backward_finds_its_weights,
    gradients_of_inputs_and_a_kept_graph,
    in_autocast,
    misuse_is_refused,
]
CHECKS += [modules_that_are_refused, modules_that_change, copies_and_casts, optimizers, infinities]
CHECKS += [failed_batches, lazy_views_and_small_ranges, disagreement, garbage]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check):
    launch(run, 2, check, backend="gloo", timeout_s=120)


MAKE = {"NaiveDDP": NaiveDDP, "FSDP": FSDP}
MAKE["ShardedOptimizer"] = lambda module: ShardedOptimizer(module.parameters(), torch.optim.AdamW)


def on_one_rank(context):
    """FSDP computes what the module does; a ShardedOptimizer says that there is no rank to share with."""
    plain, x = nn.Linear(2, 2), torch.ones(1, 2)
    wrapped = FSDP(copy.deepcopy(plain))
    for each in (plain, wrapped):
        each(x).square().sum().backward()
    wrapped.finish_gradient_synchronization()
    torch.testing.assert_close(
        [p.grad for p in wrapped.parameters()], [p.grad for p in plain.parameters()]
    )
    with pytest.raises(ValueError, match="is 1; allowed: 2 or more"):
        MAKE["ShardedOptimizer"](plain)


def test_on_one_rank_and_without_a_process_group_it_is_said_what_to_do():
    launch(run, 1, on_one_rank, backend="gloo", timeout_s=60)
    for name, make in MAKE.items():
        with pytest.raises(RuntimeError, match=f"{name} needs a process group; .* `launch`"):
            make(nn.Linear(2, 2))
