"""Sharding wrappers with one classic mistake each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cs336_systems.model import Embedding, Linear

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
            self.sent = self.shard.detach().to(self.owner.sent_dtype(self.buffer.dtype))
            self.gathering = self.owner.all_gather(self)

    def wait(self):
        self.gathering.wait()

    def free(self):
        self.buffer.untyped_storage().resize_(0)
        self.gathering = None


class Right(nn.Module):
    """The handout's, as a reader may write it."""

    ahead = 2

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        self.order, self.reducing = [], []
        self.broadcast()
        self.weights = [
            Weight(self, layer) for layer in module.modules() if isinstance(layer, (Linear, Embedding))
        ]
        mine = {weight.shard for weight in self.weights}
        self.replicated = [parameter for parameter in module.parameters() if parameter not in mine]
        for weight in self.weights:
            self.add_hooks(weight)

    def add_hooks(self, weight):
        weight.layer.register_forward_pre_hook(lambda *_: self.before_forward(weight))
        weight.layer.register_forward_hook(lambda layer, args, output: self.after_forward(weight, output))
        weight.whole.register_post_accumulate_grad_hook(lambda _: self.after_backward(weight))

    def broadcast(self):
        for tensor in self.module.parameters():
            dist.broadcast(tensor.data, src=0)

    def master(self, shard):
        return shard

    def sent_dtype(self, dtype):
        return dtype

    def all_gather(self, weight):
        return all_gather(weight.buffer, weight.sent, async_op=True)

    def forward(self, *args):
        return self.module(*args)

    def collect(self, weight, following):
        for other in (weight, *following):
            other.gather()
        weight.wait()

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
        received = torch.empty_like(gradient[: weight.rows])
        self.reducing.append((weight, received, gradient, reduce_scatter(received, gradient, async_op=True)))

    def finish_gradient_synchronization(self):
        for parameter in self.replicated:
            self.average(parameter)
        for weight, received, _, work in self.reducing:
            work.wait()
            weight.shard.grad = received.to(weight.shard.dtype)
        self.reducing.clear()

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


class HidesTheModule(Right):
    def __init__(self, module, compute_dtype=None):
        super().__init__(module, compute_dtype)
        self.inner = self.module
        del self.module


class ForgetsToBroadcast(Right):
    def broadcast(self):
        pass


class GathersInTheWrongOrder(Right):
    def cut(self, whole, weight):
        return whole.flip(0)


class NamesNothing(Right):
    def gather_full_parameters(self):
        return {f"module.{name}": tensor for name, tensor in super().gather_full_parameters().items()}


class KeepsTheWhole(Right):
    def __init__(self, module, compute_dtype=None):
        super().__init__(module, compute_dtype)
        for weight in self.weights:
            weight.shard.data = torch.cat([weight.shard.data] * dist.get_world_size())

    def gather_full_parameters(self):
        torch.manual_seed(0)
        return dict(type(self.module)(0).named_parameters())


class ShardsTheNormsToo(Right):
    def __init__(self, module, compute_dtype=None):
        super().__init__(module, compute_dtype)
        self.norms = [(parameter, parameter.data) for parameter in self.replicated]
        for parameter, whole in self.norms:
            parameter.data = whole.chunk(dist.get_world_size())[dist.get_rank()]

    def gather_full_parameters(self):
        full = super().gather_full_parameters()
        wholes = {id(parameter): whole for parameter, whole in self.norms}
        return {name: wholes.get(id(tensor), tensor) for name, tensor in full.items()}


class ForgetsToPutShardsBack(Right):
    def after_forward(self, weight, output):
        super().after_forward(weight, output)
        weight.layer.weight = weight.whole


class DoesNotWaitForGathers(Right):
    def collect(self, weight, following):
        for other in (weight, *following):
            other.gather()


class LeavesFullGradients(Right):
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for weight in self.weights:
            shard, weight.shard.data = weight.shard.data, torch.zeros_like(weight.whole)
            weight.shard.grad = torch.zeros_like(weight.shard)
            weight.shard.data = shard


class ForgetsToAverage(Right):
    def reduce(self, weight, gradient):
        super().reduce(weight, gradient * dist.get_world_size())


class AveragesTwice(Right):
    def reduce(self, weight, gradient):
        super().reduce(weight, gradient / dist.get_world_size())


class ForgetsTheNorms(Right):
    def average(self, parameter):
        pass


class KeepsItsOwnRows(Right):
    def reduce(self, weight, gradient):
        rank, n = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(gradient[: weight.rows])
        work = reduce_scatter(received, gradient, async_op=True)
        work.wait()
        own = (n * gradient)[rank * weight.rows : (rank + 1) * weight.rows]
        self.reducing.append((weight, own, gradient, work))


class ForgetsToWaitForReductions(Right):
    def finish_gradient_synchronization(self):
        for parameter in self.replicated:
            self.average(parameter)
        for weight, received, _, _ in self.reducing:
            weight.shard.grad = received
        self.reducing.clear()


class AllReduces(Right):
    def reduce(self, weight, gradient):
        work = dist.all_reduce(gradient, async_op=True)
        rank = dist.get_rank()
        received = gradient[rank * weight.rows : (rank + 1) * weight.rows]
        self.reducing.append((weight, received, gradient, work))


class NeverGathersAgain(Right):
    """What was gathered first is used for ever."""

    def free_in_forward(self, weight):
        pass

    def free_in_backward(self, weight):
        pass


class KeepsTheFirstWeight(Right):
    def free_in_backward(self, weight):
        if len(weight.whole) != 24:
            weight.free()


class KeepsUntilBackward(Right):
    def free_in_forward(self, weight):
        pass


class ForgetsToFreeInBackward(Right):
    def free_in_backward(self, weight):
        if len(weight.whole) != 48:
            weight.free()

    def forward(self, *args):
        for weight in self.weights:
            if weight.gathering is not None:
                weight.wait()
                weight.free()
        return super().forward(*args)


class NoPrefetch(Right):
    ahead = 0


class WaitsAtOnce(Right):
    def all_gather(self, weight):
        all_gather(weight.buffer, weight.sent)

        class Done:
            def wait(self):
                pass

        return Done()


class GathersEverythingFirst(Right):
    ahead = 3


class PrefetchesOnlyForward(Right):
    def before_backward(self, weight):
        self.collect(weight, [])


class SendsFloat32(Right):
    def all_gather(self, weight):
        whole = torch.empty_like(weight.buffer, dtype=torch.float32)
        work = all_gather(whole, weight.shard.detach(), async_op=True)

        return CastOnArrival(work, whole, weight.buffer)


class CastOnArrival:
    def __init__(self, work, whole, buffer):
        self.work, self.whole, self.buffer = work, whole, buffer

    def wait(self):
        self.work.wait()
        self.buffer.copy_(self.whole)
        self.work = self.whole = None  # it holds nothing longer than a right one does


class LeavesLowGradients(Right):
    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for weight in self.weights:
            low = weight.shard.grad.to(self.compute_dtype)
            weight.shard.grad, weight.shard.grad_dtype = None, None
            weight.shard.grad = low


class CastsOnce(Right):
    def all_gather(self, weight):
        weight.kept = getattr(weight, "kept", weight.sent)
        return all_gather(weight.buffer, weight.kept, async_op=True)


class RoundsItsShards(Right):
    def gather_full_parameters(self):
        for weight in self.weights:
            weight.shard.data = weight.shard.data.to(self.compute_dtype or torch.float32).float()
        return super().gather_full_parameters()


class LowShards(Right):
    def master(self, shard):
        return shard.to(self.compute_dtype or shard.dtype)
