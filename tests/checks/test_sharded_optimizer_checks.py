"""check_sharded_optimizer passes what is right, and names each classic mistake."""

import re

import pytest
import torch
import torch.distributed as dist
from each_candidate import bug
from torch.distributed import broadcast
from torch.optim import Optimizer

from cs336_systems.checks.sharded_optimizer_checks import check_sharded_optimizer, properties
from cs336_systems.parallel import ShardedOptimizer

PROPERTIES = properties(thorough=True)


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
        self.update_settings()
        self.inside.step()
        self.send()
        return loss

    def update_settings(self):
        for group, mine in zip(self.param_groups, self.inside.param_groups, strict=True):
            mine.update({name: value for name, value in group.items() if name != "params"})

    def run(self, closure):
        if closure is not None:
            with torch.enable_grad():
                return closure()

    def send(self):
        handles = [broadcast(p.data, src=rank, async_op=True) for p, rank in self.owner.items()]
        for handle in handles:
            handle.wait()


class KeepsOnlyItsShard(Right):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["params"] = [p for p in self.param_groups[-1]["params"] if self.is_mine(p)]


class NoSettingsOutside(Right):
    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)
        for group in self.param_groups:
            group.pop("lr")


class UpdatesTwice(Right):
    def send(self):
        self.inside.step()
        super().send()


class FillsGradients(Right):
    keeps = True

    @torch.no_grad()
    def step(self, closure=None):
        without = [parameter for parameter in self.owner if parameter.grad is None and closure is None]
        for parameter in without:
            parameter.grad = torch.zeros_like(parameter)
        loss = super().step(closure)
        for parameter in without:
            parameter.grad = parameter.grad if self.keeps else None
        return loss


class RunsTheClosureTwice(Right):
    def run(self, closure):
        super().run(closure)
        return super().run(closure)


class LosesGroupSettings(Right):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for group in self.param_groups:
            group.update(self.kwargs)


class LosesTheSettings(Right):
    def update_settings(self):
        pass

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


class MixesUpDtypes(Right):
    def send(self):
        for parameter, rank in self.owner.items():
            message = parameter.data.bfloat16()
            broadcast(message, src=rank)
            if rank != self.rank:
                parameter.data.copy_(message)


def nothing(self, *_):
    pass


def in_turn(self, parameters):
    self.owner.update((p, n % self.world_size) for n, p in enumerate(parameters))


def send_all(way):
    return lambda self: [way(self, parameter, rank) for parameter, rank in self.owner.items()]


BUGS = {  # what is said about each
    "^$": Right,
    "no torch.optim.Optimizer": bug(Right, __new__=lambda cls, *_, **__: object()),
    "param_groups hold 4 parameters of 8": KeepsOnlyItsShard,
    "param_groups have no 'lr'": NoSettingsOutside,
    "parameter 0 .* the settings were AdamW's defaults": LosesTheSettings,
    "parameter 0 .* updated on rank 0 alone.* broadcast": bug(Right, send=nothing),
    "parameter 0 .* as before the step, on every rank.* src=owner": bug(
        Right, send=send_all(lambda self, p, rank: broadcast(p.data, src=(rank + 1) % self.world_size))
    ),
    "8 of 8 broadcasts may still be under way": bug(
        Right, send=send_all(lambda self, p, rank: broadcast(p.data, src=rank, async_op=True))
    ),
    "updated twice": UpdatesTwice,
    "parameter 0 .* states on 2 ranks.* the one inside what it owns": bug(
        Right, is_mine=lambda self, parameter: True, send=nothing
    ),
    "rank 0 keeps 94% of the states. Assign by bytes": bug(Right, deal=in_turn),
    "without a gradient was given one": FillsGradients,
    "without a gradient was changed": bug(FillsGradients, keeps=False),
    "called the closure 0 times": bug(Right, run=nothing),
    "called the closure 2 times": RunsTheClosureTwice,
    "under no_grad": bug(Right, run=lambda self, closure: closure and closure()),
    "returned None": bug(Right, run=lambda self, closure: [Right.run(self, closure), None][1]),
    r"after zero_grad\(\) 4 of 8 gradients": bug(
        Right, zero_grad=lambda self, set_to_none=True: self.inside.zero_grad(set_to_none)
    ),
    "with two groups, parameter 0 .* each with its settings": LosesGroupSettings,
    "change of .* as a scheduler makes it": bug(Right, update_settings=nothing),
    "after add_param_group, parameter 4 .* as before .* inside its part": ForgetsLaterGroups,
    "after add_param_group, parameter 0 .* keep the first group's states": StartsAnewWithEachGroup,
    "parameter 4 .* states on 2 ranks": bug(
        Right, is_mine=lambda self, parameter: self.started or Right.is_mine(self, parameter)
    ),
    "parameter 0 .* not what one optimizer alone makes of it": MixesUpDtypes,
}


@pytest.mark.parametrize("sentence", BUGS)
def test_each_mistake_is_named(failures, sentence):
    assert re.search(sentence, failures[sentence])


def test_ours_passes_where_most_is_asked(capsys):
    check_sharded_optimizer(ShardedOptimizer, world_size=3, thorough=True, bucket_size_mb=1e-3)
    *held, verdict = capsys.readouterr().out.splitlines()
    assert all(line.startswith("✓ ") for line in held)
    assert verdict == "ShardedOptimizer: 11 cases right on 3 ranks"


def test_states_can_be_asked_for_alone(capsys):
    check_sharded_optimizer(bug(Right, send=nothing), only_states=True)
    assert "3 cases right" in capsys.readouterr().out


def test_a_mistake_follows_what_holds(capsys):
    with pytest.raises(AssertionError, match=r"^WrongRight, rank 0, 1: rank 0 keeps 94%"):
        check_sharded_optimizer(bug(Right, deal=in_turn))
    assert len(capsys.readouterr().out.splitlines()) == 2
