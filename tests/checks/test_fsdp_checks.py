"""check_fsdp passes what is right, and names each classic mistake."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from each_candidate import bug
from torch import nn
from torch.nn import functional as F

from cs336_systems.checks.fsdp_checks import check_fsdp, properties
from cs336_systems.model import Embedding, Linear
from cs336_systems.parallel import FSDP

PROPERTIES = properties()
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Weight:
    """The weight of one layer: a shard for the optimizer, and the whole one while it computes."""

    def __init__(self, owner, layer):
        self.owner, self.layer, self.gathering = owner, layer, None
        whole = layer.weight.detach()
        n, rank = dist.get_world_size(), dist.get_rank()
        self.rows = -(-len(whole) // n)
        padded = F.pad(whole, (0, 0, 0, self.rows * n - len(whole)))
        self.shard = nn.Parameter(owner.master(padded[rank * self.rows : (rank + 1) * self.rows].clone()))
        self.buffer = torch.empty_like(padded, dtype=owner.compute_dtype or whole.dtype)
        self.bytes = self.buffer.nbytes
        self.whole = nn.Parameter(self.buffer[: len(whole)].data)
        self.buffer.untyped_storage().resize_(0)
        layer.weight = self.shard

    def gather(self):
        if self.gathering is None:
            self.buffer.untyped_storage().resize_(self.bytes)
            self.sent = self.shard.detach().to(self.buffer.dtype)
            self.gathering = self.owner.all_gather(self)

    def free(self):
        self.buffer.untyped_storage().resize_(0)
        self.gathering = None


class Right(nn.Module):
    """The handout's, as a reader may write it."""

    ahead = 2

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.compute_dtype, self.order, self.reducing = module, compute_dtype, [], []
        self.broadcast()
        layers = [layer for layer in module.modules() if isinstance(layer, (Linear, Embedding))]
        self.weights = [Weight(self, layer) for layer in layers]
        mine = {weight.shard for weight in self.weights}
        self.replicated = [parameter for parameter in module.parameters() if parameter not in mine]
        for weight in self.weights:
            self.add_hooks(weight)
        self.at_the_end()

    def add_hooks(self, weight):
        weight.layer.register_forward_pre_hook(lambda *_: self.before_forward(weight))
        weight.layer.register_forward_hook(lambda layer, args, output: self.after_forward(weight, output))
        weight.whole.register_post_accumulate_grad_hook(lambda _: self.after_backward(weight))

    def broadcast(self):
        for tensor in self.module.parameters():
            dist.broadcast(tensor.data, src=0)

    def at_the_end(self):
        pass

    def master(self, shard):
        return shard

    def all_gather(self, weight):
        return all_gather(weight.buffer, weight.sent, async_op=True)

    def forward(self, *args):
        return self.module(*args)

    def collect(self, weight, following):
        for other in (weight, *following):
            other.gather()
        weight.gathering.wait()
        weight.sent = None

    def before_forward(self, weight):
        if weight not in self.order:
            self.order.append(weight)
        position = self.order.index(weight)
        self.collect(weight, self.order[position + 1 : position + 1 + self.ahead])
        weight.layer.weight = weight.whole

    def after_forward(self, weight, output):
        weight.layer.weight = weight.shard
        self.free_in_forward(weight)
        if output.requires_grad:
            output.register_hook(lambda _: self.before_backward(weight))

    def free_in_forward(self, weight):
        weight.free()

    def before_backward(self, weight):
        position = self.order.index(weight)
        self.collect(weight, self.order[max(position - self.ahead, 0) : position][::-1])

    def after_backward(self, weight):
        gradient, weight.whole.grad = weight.whole.grad, None
        self.free_in_backward(weight)
        padded = F.pad(gradient, (0, 0, 0, len(weight.buffer) - len(gradient)))
        self.reduce(weight, padded / dist.get_world_size())

    def free_in_backward(self, weight):
        weight.free()

    def reduce(self, weight, gradient):
        self.wait_for_all_but(1)
        received = torch.empty_like(gradient[: weight.rows])
        self.reducing.append((weight, received, gradient, reduce_scatter(received, gradient, async_op=True)))

    def wait_for_all_but(self, left):
        while len(self.reducing) > left:
            weight, received, _, work = self.reducing.pop(0)
            self.wait(work)
            self.set_gradient(weight, received)

    def wait(self, work):
        work.wait()

    def finish_gradient_synchronization(self):
        for parameter in self.replicated:
            self.average(parameter)
        Right.wait_for_all_but(self, 0)

    def set_gradient(self, weight, received):
        weight.shard.grad = received.to(weight.shard.dtype)

    def average(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def gather_full_parameters(self):
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        full = {names[parameter]: parameter for parameter in self.replicated}
        for weight in self.weights:
            whole = weight.shard.new_empty(len(weight.buffer), *weight.shard.shape[1:])
            all_gather(whole, weight.shard.detach())
            full[names[weight.shard]] = self.cut(whole, weight)
        return full

    def cut(self, whole, weight):
        return whole[: len(weight.whole)]


class KeepsTheWhole(Right):
    def at_the_end(self):
        for weight in self.weights:
            weight.shard.data = torch.cat([weight.shard.data] * dist.get_world_size())

    def gather_full_parameters(self):
        return dict(type(self.module)(0).named_parameters())


class ShardsTheNormToo(Right):
    def at_the_end(self):
        self.norms = {parameter: parameter.data for parameter in self.replicated}
        for parameter, whole in self.norms.items():
            parameter.data = whole.chunk(dist.get_world_size())[dist.get_rank()]

    def gather_full_parameters(self):
        return {name: self.norms.get(x, x) for name, x in super().gather_full_parameters().items()}


class AllReduces(Right):
    def reduce(self, weight, gradient):
        self.wait_for_all_but(1)
        work, first = dist.all_reduce(gradient, async_op=True), dist.get_rank() * weight.rows
        self.reducing.append((weight, gradient[first : first + weight.rows], gradient, work))


class ForgetsToFreeInBackward(Right):
    def free_in_backward(self, weight):
        if len(weight.whole) != 48:
            weight.free()

    def forward(self, *args):
        for weight in self.weights:
            if weight.gathering is not None:
                weight.gathering.wait()
                weight.free()
        return super().forward(*args)


class CastOnArrival:
    def __init__(self, work, whole, buffer):
        self.work, self.whole, self.buffer = work, whole, buffer

    def wait(self):
        self.work.wait()
        self.buffer.copy_(self.whole)
        self.work = self.whole = None  # it holds nothing longer than a right one does


class SendsFloat32(Right):
    def all_gather(self, weight):
        whole = torch.empty_like(weight.buffer, dtype=torch.float32)
        return CastOnArrival(all_gather(whole, weight.shard.detach(), async_op=True), whole, weight.buffer)


class SendsByBroadcast(Right):
    def all_gather(self, weight):
        slices = weight.buffer.chunk(dist.get_world_size())
        slices[dist.get_rank()].copy_(weight.sent)
        works = [dist.broadcast(each, src=rank, async_op=True) for rank, each in enumerate(slices)]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])


class WaitsAtOnce(Right):
    def all_gather(self, weight):
        all_gather(weight.buffer, weight.sent)
        return torch.futures.Future()  # never asked

    def collect(self, weight, following):
        for other in (weight, *following):
            other.gather()
        weight.sent = None


class KeepsTheCasts(Right):
    def collect(self, weight, following):
        super().collect(weight, following)
        self.kept = [*getattr(self, "kept", ()), weight.shard.detach().to(weight.buffer.dtype)]


class RoundsItsShards(Right):
    def gather_full_parameters(self):
        for weight in self.weights:
            weight.shard.data = weight.shard.data.to(self.compute_dtype or torch.float32).float()
        return super().gather_full_parameters()


class ForgetsToPutShardsBack(Right):
    def after_forward(self, weight, output):
        super().after_forward(weight, output)
        weight.layer.weight = weight.whole


def set_whole_gradient(self, weight, received):
    shard, weight.shard.data = weight.shard.data, torch.zeros_like(weight.whole)
    weight.shard.grad = torch.zeros_like(weight.shard)
    weight.shard.data = shard


def set_low_gradient(self, weight, received):
    weight.shard.grad, weight.shard.grad_dtype = None, None
    weight.shard.grad = received.to(self.compute_dtype)


def nothing(self, *_):
    pass


def scaled(by):
    return lambda self, weight, gradient: Right.reduce(self, weight, gradient * by)


BUGS = {  # what is said about each
    "^$": Right,
    "`.mod": bug(Right, at_the_end=lambda self: setattr(self, "module", nn.Sequential(self.module))),
    "'embedding.weight' is not that of rank 0. Broadcast": bug(Right, broadcast=nothing),
    "in the order of the ranks": bug(Right, cut=lambda self, whole, _: whole.flip(0)),
    "it has no 'embedding.weight', but w": bug(
        Right, gather_full_parameters=lambda self: {"w": self.replicated[0]}
    ),
    "'embedding.weight' still has 288 of 288 elements.* rows, 144": KeepsTheWhole,
    "'norm.weight' was sharded. Leave": ShardsTheNormToo,
    r"after forward, parameters\(\) are not the shards": ForgetsToPutShardsBack,
    r"'embedding' computes while its weight .* wait\(\)": bug(
        Right, collect=lambda self, weight, following: [x.gather() for x in (weight, *following)]
    ),
    r"shape \(24, 12\) and its shard \(12, 12\)": bug(Right, set_gradient=set_whole_gradient),
    "'embedding.weight' is the sum over the ranks. Divide": bug(Right, reduce=scaled(2)),
    "'embedding.weight' is averaged twice": bug(Right, reduce=scaled(0.5)),
    "'norm.weight' is still this rank's own": bug(Right, average=nothing),
    r"\d+ of \d+ reduce-scatter.* may still be under way": bug(Right, wait=nothing),
    "whole gradient of 'head' went through all_reduce": AllReduces,
    "with the weights from before the optimizer's step. Gather": bug(
        Right, free_in_forward=nothing, free_in_backward=nothing
    ),
    "with 'embedding.weight' from before the optimizer's step": bug(
        Right, free_in_backward=lambda self, weight: len(weight.whole) == 24 or weight.free()
    ),
    r"after forward the whole .*resize_\(0\)": bug(Right, free_in_forward=nothing),
    "after backward the whole .* still have memory: wide": ForgetsToFreeInBackward,
    "5 whole gradients have memory at once. Wait for the oldest": bug(Right, wait_for_all_but=nothing),
    "all-gather of 'up' starts only when its layer begins": bug(Right, ahead=0),
    "all-gather of 'embedding' is waited for where it starts": WaitsAtOnce,
    "all-gather of 'down' starts before .* two layers ahead": bug(Right, ahead=3),
    "in backward 'embedding' is gathered only when": bug(
        Right, before_backward=lambda self, weight: self.collect(weight, [])
    ),
    "'embedding' is gathered in torch.float32. Cast": SendsFloat32,
    "'embedding.weight' loses small updates": RoundsItsShards,
    "the shard of 'embedding.weight' is torch.bfloat16": bug(
        Right, master=lambda self, shard: shard.to(self.compute_dtype or shard.dtype)
    ),
    # Last: what it leaves in its process looks like casts that live on.
    "dtype torch.bfloat16 and its shard torch.float32": bug(Right, set_gradient=set_low_gradient),
}


@pytest.mark.parametrize("sentence", BUGS)
def test_each_mistake_is_named(failures, sentence):
    assert re.search(sentence, failures[sentence])


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}])
def test_ours_passes_where_most_is_asked(options, capsys):
    check_fsdp(FSDP, world_size=3, thorough=True, **options)
    *held, verdict = capsys.readouterr().out.splitlines()
    assert all(line.startswith("✓ ") for line in held)
    assert verdict == f"FSDP: {len(held)} cases right on 3 ranks"


def test_what_cannot_be_watched_is_not_judged(capsys):
    check_fsdp(SendsByBroadcast, only=("prefetch", "precision"))
    first, *_, verdict = capsys.readouterr().out.splitlines()
    assert re.match("· .* not watched", first)
    assert verdict == "SendsByBroadcast: 1 cases right on 2 ranks"


def test_casts_that_live_on_are_seen():
    """Alone: what one candidate keeps, the next would be blamed for."""
    with pytest.raises(AssertionError, match="casts of shards live on"):
        check_fsdp(KeepsTheCasts, only=("precision",))


def test_parts_can_be_asked_for():
    no_prefetch = bug(Right, ahead=0)
    check_fsdp(no_prefetch, only=("shards", "forward"))
    with pytest.raises(AssertionError, match="rank 0, 1: the all-gather of 'up'"):
        check_fsdp(no_prefetch, only=("prefetch",))
    with pytest.raises(ValueError, match="'speed' is unknown; allowed: shards, forward"):
        check_fsdp(Right, only=("speed",))
