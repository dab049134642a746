"""Sharded optimizers with one classic mistake each."""

import torch
import torch.distributed as dist
from torch.distributed import broadcast
from torch.optim import Optimizer


class Right(Optimizer):
    """The handout's, as a reader may write it."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.optimizer_cls, self.kwargs = optimizer_cls, kwargs
        self.owner, self.load, self.inside = {}, [0] * self.world_size, None
        self.started = False
        super().__init__(params, kwargs)
        self.started = True

    def deal(self, parameters):
        for parameter in parameters:
            rank = self.load.index(min(self.load))
            self.load[rank] += parameter.nbytes
            self.owner[parameter] = rank

    def is_mine(self, parameter):
        return self.owner[parameter] == self.rank

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.deal(group["params"])
        mine = {**group, "params": [p for p in group["params"] if self.is_mine(p)]}
        if self.inside is None:
            self.inside = self.optimizer_cls([mine], **self.kwargs)
        else:
            self.inside.add_param_group(mine)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.run(closure)
        for group, mine in zip(self.param_groups, self.inside.param_groups, strict=True):
            mine.update({name: value for name, value in group.items() if name != "params"})
        self.inside.step()
        self.send()
        return loss

    def run(self, closure):
        if closure is not None:
            with torch.enable_grad():
                return closure()

    def send(self):
        handles = [broadcast(p.data, src=rank, async_op=True) for p, rank in self.owner.items()]
        for handle in handles:
            handle.wait()


class NoOptimizer(Right):
    def __new__(cls, *args, **kwargs):
        return object()


class KeepsOnlyItsShard(Right):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["params"] = [p for p in self.param_groups[-1]["params"] if self.is_mine(p)]


class NoSettingsOutside(Right):
    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)
        for group in self.param_groups:
            group.pop("lr")


class ForgetsToSend(Right):
    def send(self):
        pass


class SendsFromTheWrongRank(Right):
    def send(self):
        for parameter, rank in self.owner.items():
            broadcast(parameter.data, src=(rank + 1) % self.world_size)


class ForgetsToWait(Right):
    def send(self):
        for parameter, rank in self.owner.items():
            broadcast(parameter.data, src=rank, async_op=True)


class UpdatesTwice(Right):
    def send(self):
        self.inside.step()
        super().send()


class SharesNothing(Right):
    def is_mine(self, parameter):
        return True

    def send(self):
        pass


class DealsByTurns(Right):
    def deal(self, parameters):
        for number, parameter in enumerate(parameters):
            self.owner[parameter] = number % self.world_size


class FillsGradients(Right):
    def step(self, closure=None):
        loss = self.run(closure)
        for parameter in self.owner:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().step()
        return loss


class DecaysWithoutGradient(Right):
    @torch.no_grad()
    def step(self, closure=None):
        without = [parameter for parameter in self.owner if parameter.grad is None and closure is None]
        for parameter in without:
            parameter.grad = torch.zeros_like(parameter)
        loss = super().step(closure)
        for parameter in without:
            parameter.grad = None
        return loss


class IgnoresTheClosure(Right):
    def run(self, closure):
        return None


class LosesTheLoss(Right):
    def run(self, closure):
        super().run(closure)


class ClosureWithoutGradients(Right):
    def run(self, closure):
        return closure() if closure is not None else None


class RunsTheClosureTwice(Right):
    def run(self, closure):
        super().run(closure)
        return super().run(closure)


class ClearsItsShard(Right):
    def zero_grad(self, set_to_none=True):
        self.inside.zero_grad(set_to_none)


class LosesGroupSettings(Right):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for group in self.param_groups:
            group.update(self.kwargs)


class DeafToSchedulers(Right):
    @torch.no_grad()
    def step(self, closure=None):
        loss = self.run(closure)
        self.inside.step()
        self.send()
        return loss


class LosesTheSettings(DeafToSchedulers):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.inside = self.optimizer_cls([p for p in param_group["params"] if self.is_mine(p)])


class ForgetsLaterGroups(Right):
    def add_param_group(self, param_group):
        if not self.started:
            super().add_param_group(param_group)
            return
        Optimizer.add_param_group(self, param_group)
        self.inside.add_param_group({**param_group, "params": []})


class StartsAnewWithEachGroup(Right):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.inside.state.clear()


class SharesOnlyTheFirstGroup(Right):
    def is_mine(self, parameter):
        return self.started or super().is_mine(parameter)


class MixesUpDtypes(Right):
    def send(self):
        for parameter, rank in self.owner.items():
            message = parameter.data.bfloat16()
            broadcast(message, src=rank)
            if rank != self.rank:
                parameter.data.copy_(message)
