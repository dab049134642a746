"""What these tests share: wrappers by name, one process beside a wrapper, and one launch for many checks."""

import os
import warnings
from functools import partial

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems import parallel
from cs336_systems.checks.on_ranks import try_properties
from cs336_systems.parallel import FSDP, BucketedDDP

DDP = {
    "naive": parallel.NaiveDDP,
    "flat": parallel.FlatDDP,
    "overlapped": parallel.OverlappedDDP,
    "some buckets": partial(BucketedDDP, bucket_size_mb=4e-4),
}
FSDPS = {
    f"fsdp {units} {prefetch}": partial(FSDP, unit_types=units, prefetch=prefetch)
    for units in ((), ("Block",))
    for prefetch in (0, 2)
}
ALL = DDP | FSDPS


class Odd(nn.Module):
    """Transposed weights, scalars, empty parameters, integer and boolean buffers."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.transposed = nn.Parameter(torch.randn(3, 5).T)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("flags", torch.tensor([seed == 0, False]))
        self.register_buffer("transposed_too", torch.randn(2, 3).T)


def passes(context, candidate, check, **options):
    """It has every property that its checker asks for."""
    properties = partial(check.__wrapped__, **options)
    mistakes = try_properties(context, cloudpickle.dumps((candidate, properties)))
    assert not mistakes, (candidate, mistakes)


def rows(context, whole):
    n = -(-len(whole) // context.world_size)
    return whole[context.rank * n : (context.rank + 1) * n]


def same_gradients(context, wrapped, alone, what, **tolerance):
    sharded = getattr(wrapped, "_sharded", ())
    for name, other in alone.named_parameters():
        mine = wrapped.module.get_parameter(name)
        expected = other.grad
        if expected is None or mine.grad is None:
            assert mine.grad is expected, (what, name)
            continue
        if mine in sharded:
            expected = rows(context, expected)
        torch.testing.assert_close(mine.grad, expected, msg=f"{what}, {name}", **tolerance)


def same_weights(wrapped, alone, what, rtol=1e-4, atol=1e-6):
    is_sharded = isinstance(wrapped, FSDP)
    whole = wrapped.gather_full_parameters() if is_sharded else wrapped.module.state_dict()
    for name, parameter in alone.named_parameters():
        tolerance = {"rtol": rtol, "atol": atol, "msg": f"{what}, {name}"}
        torch.testing.assert_close(whole[name], parameter.detach(), **tolerance)


def one_pass(model, inputs):
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()


def backward(context, alone, wrapped, loss, **options):
    """One process on the batches of all ranks, and this rank on its own."""
    for rank in range(context.world_size):
        (loss(alone, rank) / context.world_size).backward(**options)
    loss(wrapped, context.rank).backward(**options)


def train(context, alone, wrapped, loss, what, *, make, max_norm=None):
    """The same with an optimizer: the weights have to stay the same. loss(model, rank, step)."""
    pair = [make(model.parameters()) for model in (alone, wrapped)]
    for step in range(2):
        for optimizer in pair:
            optimizer.zero_grad()
        backward(context, alone, wrapped, partial(loss, step=step))
        wrapped.finish_gradient_synchronization()
        if max_norm:
            norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
            torch.testing.assert_close(wrapped.clip_grad_norm_(max_norm), norm, rtol=1e-5, atol=0)
        for optimizer in pair:
            optimizer.step()
    same_weights(wrapped, alone, what)


def run(context, *checks):
    """One launch for all of them: starting processes takes longer than the checks."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Lazy modules are a new feature")
    # What cuBLAS needs to be deterministic.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.set_default_device(context.device)
    for check in checks:
        print(check.__name__)
        check(context)
        dist.barrier()
