"""What autograd and PyTorch's optimizers guarantee holds under every wrapper, or is refused in a sentence.

Each check is a promise, which its name says; `wrappers.run` runs it on every rank.
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
from torch import Tensor, nn, optim
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
    train,
)

from cs336_systems.model import Linear, SwiGLU
from cs336_systems.parallel import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlappedDDP,
    ShardedOptimizer,
    TensorParallelSwiGLU,
    TorchDDP,
    launch,
)
from labbook.memory import saved_for_backward

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


def recompute(block, h):
    inner = checkpoint(lambda y: block.b(y).tanh(), h, use_reentrant=False)
    return block.b(inner)


# The ways in which the results of a block's second layer leave it.
RESULTS = {
    "dataclass": lambda block, h: Output(block.b(h), h),
    "view": lambda block, h: block.b(h)[None].squeeze(0),
    "checkpoint": recompute,
    "functional": lambda block, h: Square.apply(h, block.b.weight) + block.b.bias,
}


WAYS = ["plain", "frozen", "tied"] + list(RESULTS)


class Block(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.leave = RESULTS.get(way, lambda block, h: block.b(h))
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.leave(self, self.a(x).tanh())


class Net(nn.Module):
    def __init__(self, way="plain", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.way = way
        self.first = Block(way)
        self.second = Block(way)
        self.head = nn.Linear(WIDTH, 3)
        if way == "frozen":  # a part of a layer, and another layer
            self.first.a.weight.requires_grad_(False)
            self.second.b.requires_grad_(False)
        if way == "tied":
            self.second.a.weight = self.first.b.weight

    def forward(self, x):
        a = self.first(x)
        b = self.second(x)
        if self.way == "dataclass":
            return self.head(a.hidden * b.extra)
        if self.way == "view":
            a = a.unsqueeze(0)[0]
            a += b
            a[:, :2] *= b[:, :2]
        return self.head(a + b)


def backward_finds_its_weights_whatever_way_results_take(context):
    for way, (name, wrap) in itertools.product(WAYS, ALL.items()):
        if way == "functional" and name.startswith("fsdp ()"):
            continue  # its block reads a weight that is gathered for its layer alone
        alone = Net(way)
        wrapped = wrap(Net(way, seed=context.rank))
        for _ in range(2):
            backward(context, alone, wrapped, loss_of)
        wrapped.finish_gradient_synchronization()
        same_gradients(context, wrapped, alone, (way, name))


def inputs_have_gradients_and_a_graph_can_be_kept(context):
    for name, wrap in FSDPS.items():
        alone = Net("view")
        wrapped = wrap(Net("view"))
        x = batch(context.rank).requires_grad_()
        total = wrapped(x).square().mean()
        gradient = torch.autograd.grad(total, x, retain_graph=True)
        expected = torch.autograd.grad(alone(x).square().mean(), x)
        torch.testing.assert_close(gradient, expected, msg=name)
        total.backward(retain_graph=True)
        total.backward()
        for rank in range(context.world_size):
            (2 * loss_of(alone, rank) / context.world_size).backward()
        wrapped.finish_gradient_synchronization()
        same_gradients(context, wrapped, alone, name)


def autocast_computes_as_in_one_process(context):
    for name, wrap in FSDPS.items():
        alone = Net("checkpoint")
        wrapped = wrap(Net("checkpoint"))
        with torch.autocast("cpu", torch.bfloat16):
            backward(context, alone, wrapped, loss_of)
        wrapped.finish_gradient_synchronization()
        same_gradients(context, wrapped, alone, name, rtol=0.05, atol=0.01)


def autocast_keeps_no_copy_of_a_whole_weight(context):
    for name, wrap in FSDPS.items():
        wrapped = wrap(Net("view"))
        with torch.autocast("cpu", torch.bfloat16):
            saved = saved_for_backward(wrapped, batch(context.rank))
        assert WIDTH * WIDTH * 2 not in set(saved["size_bytes"]), name


def weights_that_an_optimizer_changed_since_forward_are_noticed(context):
    for units in ((), ("Block",)):
        wrapped = FSDP(Net(), unit_types=units)
        optimizer = optim.SGD(wrapped.parameters(), lr=0.1)
        wrapped(batch(0)).sum().backward()
        total = wrapped(batch(0)).sum()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation; allowed"):
            total.backward()


def a_backward_that_is_to_be_differentiated_is_refused(context):
    for units in ((), ("Block",)):
        x = batch(0).requires_grad_()
        wrapped = FSDP(Net(), unit_types=units)
        with pytest.raises(RuntimeError, match="is to be differentiated; allowed"):
            torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)


class Writes(Block):
    def forward(self, x):
        h = self.a(x).sigmoid()
        y = self.b(h)
        h.mul_(2)  # backward of sigmoid and of b needs what it was
        return y


def activations_that_are_changed_in_place_are_noticed(context):
    wrapped = FSDP(Writes("plain"), unit_types=("Writes",))
    with pytest.raises(RuntimeError, match=r"a tensor .*modified by an inplace operation"):
        wrapped(batch(0)).sum().backward()


def tensors_without_values_are_refused(context):
    with torch.device("meta"):
        only_buffers = nn.BatchNorm1d(2, affine=False)
        modules = [Net(), nn.Sequential(nn.LazyLinear(2, device="cpu"))]
    modules.append(nn.Sequential(only_buffers, nn.Linear(2, 2)))
    for wrap, module in itertools.product(ALL.values(), modules):
        with pytest.raises(ValueError, match=r"without values \(meta, or lazy\); allowed"):
            wrap(module)


def sparse_gradients_are_refused_before_anything_is_sent(context):
    for wrap in ALL.values():
        with pytest.raises(TypeError, match="sparse"):
            one_pass(wrap(nn.Embedding(4, 2, sparse=True)), torch.tensor([1]))
        dist.barrier()


def hooks_that_would_not_be_called_are_refused(context):
    module = Net()
    module.head.weight.register_hook(id)
    with pytest.raises(ValueError, match="has a hook that FSDP"):
        FSDP(module)


def replace_a_layer(net):
    net.head = nn.Linear(WIDTH, 2)


def unfreeze(net):
    net.first.a.weight.requires_grad_(True)


def modules_that_change_are_refused(context):
    """Before the first step or later."""
    changes = (replace_a_layer, unfreeze)
    for wrap, change, steps in itertools.product(ALL.values(), changes, (0, 1)):
        wrapped = wrap(Net("frozen"))
        for _ in range(steps):
            one_pass(wrapped, batch(0))
            wrapped.zero_grad()
        change(wrapped.module)
        with pytest.raises(RuntimeError, match="replaced or unfrozen since"):
            one_pass(wrapped, batch(0))


def shards_are_not_copied_nor_pickled(context):
    wrapped = FSDP(nn.Linear(2, 2))
    optimizer = ShardedOptimizer(Net().parameters(), optim.AdamW)
    save = partial(torch.save, f=io.BytesIO())
    for thing in (wrapped, wrapped.module, optimizer):
        for take in (copy.deepcopy, save):
            with pytest.raises(TypeError, match="cannot be copied or pickled; allowed"):
                take(thing)


def a_wrapped_module_keeps_its_dtype_and_its_shards(context):
    wrapped = FSDP(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"allowed: torch\.float32 on"):
        wrapped.to(torch.bfloat16)
    state = wrapped.to(context.device).state_dict()
    raised = {name: x + 1 for name, x in state.items()}
    wrapped.load_state_dict(raised)
    for name, x in wrapped.named_parameters():
        assert torch.equal(x, raised[name])


def a_shard_that_another_rank_saved_is_refused(context):
    """Of the module or of its optimizer; whatever was done to the tensors of the state in between."""
    wrapped = FSDP(layer())
    optimizer = optim.AdamW(wrapped.parameters())
    wrapped(torch.ones(1, 4)).sum().backward()
    wrapped.finish_gradient_synchronization()
    optimizer.step()
    states = [None] * context.world_size
    saved = [module.state_dict() for module in (wrapped, wrapped.module)]
    saved = [{name: x.half() for name, x in state.items()} for state in saved]
    dist.all_gather_object(states, tuple(saved) + (optimizer.state_dict(),))
    of_all, of_module, of_optimizer = states[1 - context.rank]
    for module, state in ((wrapped, of_all), (wrapped.module, of_module)):
        with pytest.raises(ValueError, match=r"of shard \[\d, 2\] .* gave on this rank"):
            module.load_state_dict(state)
        with pytest.raises(ValueError, match="of shard None"):
            module.load_state_dict(dict(module.named_parameters()))
    optimizer.step()
    optimizer.load_state_dict(of_optimizer)
    with pytest.raises(ValueError, match=r"of shard \[\d, 2\] .* gave on this rank"):
        optimizer.step()


def gradients_that_a_hook_has_taken_are_missed(context):
    """An optimizer's step in backward: not where a shard's hook comes behind its mean."""

    def step(wrapped):
        wrapped(torch.randn(2, 4)).square().sum().backward()
        wrapped.finish_gradient_synchronization()

    for wrap in ALL.values():
        wrapped = wrap(nn.Sequential(Linear(4, 4), nn.LayerNorm(4), Linear(4, 4)))
        norm = wrapped.module[1].weight
        norm.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with pytest.raises(RuntimeError, match="a hook has taken a gradient"):
            step(wrapped)


def parts_are_not_taken_for_weights(context):
    for module in (TensorParallelSwiGLU(SwiGLU(4, 8)), FSDP(Net()).module):
        for wrap in ALL.values():
            with pytest.raises(ValueError, match="wrapper, of whole weights"):
                wrap(module)
        with pytest.raises(ValueError, match="allowed: whole weights"):
            ShardedOptimizer(module.parameters(), optim.SGD)
    wrapped = FSDP(layer())
    with pytest.raises(RuntimeError, match="initialise, then wrap"):
        wrapped.apply(lambda module: None)


def gradients_are_not_clipped_before_they_are_averaged(context):
    wrapped = FSDP(layer())
    for _ in range(2):
        wrapped(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="not yet averaged"):
            wrapped.clip_grad_norm_(1.0)
        wrapped.finish_gradient_synchronization()
        wrapped.clip_grad_norm_(1.0)


class OwnMuon(optim.Muon):
    """A subclass is refused like its class."""


def optimizers_that_need_whole_weights_are_refused(context):
    """Before they change anything."""
    for make in (optim.Muon, OwnMuon, optim.Adafactor, optim.LBFGS):
        wrapped = FSDP(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)))
        (weight,) = wrapped.parameters()
        before = weight.detach().clone()
        optimizer = make(wrapped.parameters(), lr=0.1)
        one_pass(wrapped, batch(context.rank))
        with pytest.raises(ValueError, match=f"{make.__name__} looks at more than one element"):
            optimizer.step(lambda: 0.0)
        assert torch.equal(weight, before)


# Refused, or of sparse gradients alone.
OTHERS = {"Optimizer", "Muon", "Adafactor", "LBFGS", "SparseAdam"}


def all_other_optimizers_of_pytorch_are_right(context):
    """Those of its next version, too."""
    for name in sorted(set(optim.__all__) - OTHERS):
        kind = getattr(optim, name)
        if isinstance(kind, type):
            train(context, Net(), FSDP(Net()), loss_of, name, make=partial(kind, lr=0.01))
    fused = partial(optim.AdamW, lr=0.01, fused=True)
    train(context, Net(), FSDP(Net()), loss_of, "fused", make=fused)


class Apart(nn.Module):
    """Two layers, one beside the other; `factor` is in the gradient of the second's only row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 4)
        self.second = nn.Linear(4, 1, bias=False)

    def forward(self, x, factor):
        return self.first(x).sum() + factor * self.second(torch.ones(1, 4)).sum()


HALF = partial(FSDP, compute_dtype=torch.float16)


def an_infinity_on_one_rank_skips_the_step_on_all(context):
    """In a row of a weight of which the other rank has none."""
    for wrap, bad in itertools.product((FSDP, HALF), (torch.inf, torch.nan)):
        module = Apart()
        wrapped = wrap(module)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = optim.SGD(wrapped.parameters(), lr=0.1)
        before = [p.detach().clone() for p in module.parameters()]
        for step in range(3):
            wrapped.zero_grad()
            loss = wrapped(torch.ones(1, 2), 1.0 if step else bad)
            scaler.scale(loss.float()).backward()
            wrapped.finish_gradient_synchronization()
            scaler.step(optimizer)
            scaler.update()
            is_skipped = all(map(torch.equal, before, module.parameters()))
            assert (scaler.get_scale(), is_skipped) == (2.0, step == 0), (wrap, bad)


def run_out_of_memory(_):
    raise MemoryError("out of memory")


class Fragile(Net):
    def forward(self, x, where=""):
        h = self.first(x)
        if where == "backward":
            h.register_hook(run_out_of_memory)
        return self.head(self.second("no tensor" if where == "forward" else h))


# Where each step fails.
FAILURES = ("", "backward", "", "forward", "backward", "backward", "")


def failed_batches_leave_no_trace(context):
    """After zero_grad of the wrapper it is as if they had not been; of the optimizer, the next is refused."""
    for (name, wrap), sets_to_none in itertools.product(ALL.items(), (True, False)):
        alone = Fragile()
        wrapped = wrap(Fragile())
        reference = optim.AdamW(alone.parameters(), lr=0.01)
        trained = optim.AdamW(wrapped.parameters(), lr=0.01)
        for step, where in enumerate(FAILURES):
            wrapped.zero_grad(set_to_none=sets_to_none)
            reference.zero_grad()
            with contextlib.suppress(MemoryError, TypeError):
                wrapped(batch(context.rank, step), where).square().mean().backward()
                wrapped.finish_gradient_synchronization()
                trained.step()
            if not where:
                for rank in range(context.world_size):
                    (loss_of(alone, rank, step) / context.world_size).backward()
                reference.step()
        same_weights(wrapped, alone, (name, sets_to_none), rtol=1.3e-6, atol=1e-5)
    wrapped = OverlappedDDP(Fragile())
    for parameter in wrapped.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(MemoryError):
        wrapped(batch(0), "backward").sum().backward()
    with pytest.raises(RuntimeError, match="has raised an error"):
        wrapped(batch(0))


def means_of_float16_do_not_overflow(context):
    wraps = dict.fromkeys(DDP.values(), torch.float16) | {HALF: torch.float32}
    for wrap, dtype in wraps.items():
        wrapped = wrap(nn.Linear(4, 4, bias=False, dtype=dtype))
        one_pass(wrapped, torch.full((1, 4), 40_000, dtype=dtype))
        assert (wrapped.module.weight.grad == 40_000).all()


def layer(rows=4, bias=True, trains=True):
    return nn.Linear(4, rows, bias=bias).requires_grad_(trains)


def ranks_that_wrap_different_things_all_get_an_error(context):
    rank = context.rank
    first = rank == 0
    norm = nn.BatchNorm1d if first else nn.LayerNorm
    wrap = NaiveDDP if first else FlatDDP
    layers = [
        (lambda: NaiveDDP(layer(4 + rank)), "weight (4, 4)"),
        (lambda: FlatDDP(layer(bias=first)), "rank 1 has 'nothing'"),
        (lambda: NaiveDDP(layer(trains=first)), "without gradient"),
    ]
    classes = [
        (lambda: NaiveDDP(norm(4)), "'running_mean (4,)"),
        (lambda: wrap(layer()), "'FlatDDP'"),
    ]
    for make, words in layers + classes:
        with pytest.raises(ValueError, match=re.escape(words)):
            make()


def what_cannot_be_wrapped_is_refused(context):
    mixed = nn.Sequential(layer(), layer().half())
    nothing = [
        (lambda: NaiveDDP(layer(trains=False)), "no trainable parameter"),
        (lambda: FSDP(nn.LayerNorm(4)), "LayerNorm has nothing to shard; allowed: a trainable"),
    ]
    wrong = [
        (lambda: FSDP(mixed), "allowed: one floating-point dtype"),
        (lambda: FSDP(mixed, "bfloat16"), "compute_dtype is 'bfloat16'; allowed"),
        (lambda: BucketedDDP(mixed, float("nan")), "bucket_size_mb is nan"),
    ]
    for make, words in nothing + wrong:
        with pytest.raises(ValueError, match=re.escape(words)):
            make()


def a_deleted_wrapper_is_freed_with_its_module(context):
    """Hooks and all; PyTorch's own too."""
    with_torch = ALL | {"torch": partial(TorchDDP, bucket_size_mb=25)}
    for name, wrap in with_torch.items():
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = wrap(module)
        one_pass(model, torch.ones(1, 2))
        watched = [weakref.ref(thing) for thing in (model, module, module[0].weight)]
        watched += map(weakref.ref, vars(model).get("_groups", ()))
        del module, model
        gc.collect()
        assert not any(reference() for reference in watched), name


# A launch for each line, as starting processes takes longer than most checks.
PROMISES = {
    "backward": [
        backward_finds_its_weights_whatever_way_results_take,
        inputs_have_gradients_and_a_graph_can_be_kept,
        autocast_computes_as_in_one_process,
        autocast_keeps_no_copy_of_a_whole_weight,
        means_of_float16_do_not_overflow,
    ],
    "what autograd would notice": [
        weights_that_an_optimizer_changed_since_forward_are_noticed,
        a_backward_that_is_to_be_differentiated_is_refused,
        activations_that_are_changed_in_place_are_noticed,
    ],
    "modules": [
        tensors_without_values_are_refused,
        sparse_gradients_are_refused_before_anything_is_sent,
        hooks_that_would_not_be_called_are_refused,
        modules_that_change_are_refused,
        shards_are_not_copied_nor_pickled,
        a_wrapped_module_keeps_its_dtype_and_its_shards,
        a_shard_that_another_rank_saved_is_refused,
        gradients_that_a_hook_has_taken_are_missed,
        parts_are_not_taken_for_weights,
        gradients_are_not_clipped_before_they_are_averaged,
        a_deleted_wrapper_is_freed_with_its_module,
    ],
    "ranks": [
        ranks_that_wrap_different_things_all_get_an_error,
        what_cannot_be_wrapped_is_refused,
    ],
    "optimizers": [
        optimizers_that_need_whole_weights_are_refused,
        all_other_optimizers_of_pytorch_are_right,
        an_infinity_on_one_rank_skips_the_step_on_all,
    ],
    "failures": [failed_batches_leave_no_trace],
}


@pytest.mark.parametrize("what", PROMISES)
def test_on_two_ranks(what):
    launch(run, 2, *PROMISES[what], backend="gloo", timeout_s=240)


def test_without_a_process_group_it_is_said_what_to_do():
    for make in (NaiveDDP, FSDP, partial(ShardedOptimizer, optimizer_cls=optim.AdamW)):
        name = getattr(make, "func", make).__name__
        with pytest.raises(RuntimeError, match=f"{name} needs a process group; .* `launch`"):
            make(layer())
