"""check_ddp passes what is right, and names each classic mistake."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from each_candidate import bug
from torch import nn
from torch.distributed import all_reduce

from cs336_systems.checks.data_parallel import float16_means, hooks_run
from cs336_systems.checks.ddp_checks import check_ddp, properties
from cs336_systems.checks.exercise import step

PROPERTIES = [*properties(thorough=False, overlapped=True), float16_means, hooks_run]


class Right(nn.Module):
    """The handout's overlapped wrapper, as a reader may write it."""

    def __init__(self, module):
        super().__init__()
        self.module, self.handles = module, []
        self.broadcast(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def broadcast(self, module):
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def on_gradient(self, parameter):
        parameter.grad.div_(dist.get_world_size())
        self.handles.append(all_reduce(parameter.grad, async_op=True))

    def finish_gradient_synchronization(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


def reduces(what, async_op=True):
    """on_gradient that all-reduces what this makes of the parameter."""

    def on_gradient(self, parameter):
        with torch.no_grad():
            self.handles.append(dist.all_reduce(what(parameter), async_op=async_op))

    return on_gradient


class SendsLate(Right):
    def on_gradient(self, parameter):
        pass

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                super().on_gradient(parameter)
        super().finish_gradient_synchronization()


class DividesLate(Right):
    on_gradient = reduces(lambda p: p.grad)

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad /= dist.get_world_size()


def lose_hooks(self, module):
    Right.broadcast(self, module)
    for parameter in module.parameters():
        (parameter._post_accumulate_grad_hooks or {}).clear()


class HidesTheModule(Right):
    def __init__(self, module):
        super().__init__(module)
        self.inner = self.module
        del self.module

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


BUGS = {  # what is said about each
    "^$": Right,
    "rank 1: after wrapping, 'shift' .* Broadcast every parameter": bug(
        Right, broadcast=lambda self, module: None
    ),
    "rank 1: .* 'shift' ": bug(
        Right, broadcast=lambda self, m: [dist.broadcast(p.data, src=0) for p in m.parameters()]
    ),
    "'first.weight' has changed before": bug(Right, on_gradient=reduces(lambda p: p.data.div_(4))),
    "'first.weight' is the sum over .* Div": bug(Right, on_gradient=reduces(lambda p: p.grad)),
    "rank 0, 1: backward waits for each message. .* async_op=True": bug(
        Right, on_gradient=lambda self, p: dist.all_reduce(p.grad.div_(dist.get_world_size()))
    ),
    "rank 0, 1: 4 of 4 messages leave only in finish_gradient_synchronization": SendsLate,
    "rank 0[, 1]*: 4 of 4 all-reduces may still be under way": bug(
        Right, finish_gradient_synchronization=lambda self: self.handles.clear()
    ),
    "rank 0[, 1]*: 1 of 4 all-reduces": bug(
        Right, finish_gradient_synchronization=lambda self: [h.wait() for h in self.handles[:-1]]
    ),
    "'first.weight' is still this rank's own. Average it": bug(
        Right, on_gradient=reduces(lambda p: p.grad / dist.get_world_size())
    ),
    "'rarely.weight' is still this rank's own": bug(
        Right,
        on_gradient=lambda self, p: None if p is self.module.rarely.weight else Right.on_gradient(self, p),
    ),
    "frozen parameter 'frozen.weight'": bug(
        Right, broadcast=lambda self, m: Right.broadcast(self, m.requires_grad_())
    ),
    "rank 0, 1: `.module` ": HidesTheModule,
    "float16 gradients .* divide by the world size before the sum": DividesLate,
    "hooks on a parameter do not": bug(Right, broadcast=lose_hooks),
}


@pytest.mark.parametrize("sentence", BUGS)
def test_each_mistake_is_named(failures, sentence):
    assert re.search(sentence, failures[sentence])


def test_a_class_of_the_caller_passes(capsys):
    class MyDDP(Right):
        """Defined here, so no worker could import it."""

    check_ddp(MyDDP)
    *held, verdict = capsys.readouterr().out.splitlines()
    assert all(line.startswith("✓ ") for line in held)
    assert verdict == "MyDDP: 4 cases right on 2 ranks"


class Crashes(Right):
    def finish_gradient_synchronization(self):
        raise KeyError("oh")


class ReturnsNothing(Right):
    def forward(self, *args, **kwargs):
        self.module(*args, **kwargs)


class NeverEnds(Right):
    def finish_gradient_synchronization(self):
        while True:
            time.sleep(0.01)


class Exits(Right):
    def finish_gradient_synchronization(self):
        raise SystemExit


@pytest.mark.parametrize(
    ("wrong", "timeout_s", "named"),
    [
        (Crashes, 60, "raised KeyError: 'oh'"),
        (ReturnsNothing, 60, "return"),
        (NeverEnds, 4, "not done within 4 s"),
        (Exits, 60, "SystemExit"),
    ],
)
def test_what_does_not_get_through_is_one_sentence(wrong, timeout_s, named, capsys):
    with step("step"):
        check_ddp(wrong, timeout_s=timeout_s, world_size=1)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗")]
    assert named in line


def test_the_thorough_properties_ask_for_more():
    with pytest.raises(AssertionError, match=r"Right, rank 0: .* no_sync"):
        check_ddp(Right, world_size=1, thorough=True)
