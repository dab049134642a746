"""The checkers of DDP, FSDP, a sharded optimizer and tensor parallelism pass the notebooks' solutions.

And they name each classic mistake: a solution with a piece of it changed.
"""

import re
from functools import cache, partial

import cloudpickle
import pytest
from solutions import written

from cs336_systems import checks
from cs336_systems.checks.on_ranks import try_properties
from cs336_systems.parallel import launch


def lines(*lines):
    return "\n        ".join(lines)


# What is said of a solution, and the pieces in which it is changed: (piece, instead, piece, instead, ...).
START = "self.handles = []"
SEND = "dist.all_reduce(parameter.grad, async_op=True)"
DIVIDE = "parameter.grad /= dist.get_world_size()"
FINISH = "while self.handles:"
DDP = {
    "^$": (),
    "rank 1: after .* 'first.weight' .* Broadcast every": ("dist.broadcast(tensor.data, src=0)", "pass"),
    "rank 1: .* 'inner.0.shift' ": (", *module.buffers()", ""),
    "'first.weight' has changed before": ("all_reduce(parameter.grad", "all_reduce(parameter.data.div_(4)"),
    "rank 1: backward of rank 0 waits for messages.* async_op=True":
        (f"self.handles.append({SEND})", "dist.all_reduce(parameter.grad)"),
    "rank 0: backward of rank 1 waits":
        (DIVIDE, lines(DIVIDE, "if dist.get_rank(): [each.get_future().wait() for each in self.handles]")),
    "rank 0, 1: all messages leave with the last":
        (DIVIDE, lines("self.held = [*getattr(self, 'held', []), parameter]",
         "if parameter is not self.module.first.weight: return"),
         f"self.handles.append({SEND})",
         lines("for p in self.held: p.grad /= dist.get_world_size()",
         "self.handles += [dist.all_reduce(p.grad, async_op=True) for p in self.held]", "self.held.clear()")),
    "rank 0, 1: no message was seen":
        (f"self.handles.append({SEND})", "self.handles.append(dist.group.WORLD.allreduce([parameter.grad]))"),
    "'rarely.weight' is still this rank's own":
        (DIVIDE, lines("if parameter is self.module.rarely.weight: return", DIVIDE)),
    "frozen parameter 'frozen.weight'": (START, lines(START, "module.requires_grad_()")),
    "rank 0, 1: `.module` ": ("self.module", "self.inner"),
}  # fmt: skip
CLASS = "class AsyncSharded(ShardedStates):\n"
SUPER = "super().__init__(params, settings)"
BROADCASTS = """[
            dist.broadcast(p.data, src=owner, async_op=True) for p, owner in self.owners.items()
        ]"""
ROUNDED = "[[dist.broadcast(y := p.data.bfloat16(), src=r), p.data.copy_(y)] for p, r in self.owners.items()]"
NO_UPDATE = ("mine.update(", "dict(")
JOINS = "self.inside.add_param_group(mine)"
STEP = "self.inside.step()\n"
FILL = (
    "without = [p for p in self.owners if p.grad is None]",
    "for p in without: p.grad = torch.zeros_like(p)",
)
OPTIMIZER = {
    "^$": (),
    "without a gradient was given one": (STEP, lines(*FILL, STEP)),
    r"after zero_grad\(\) [35] of 8 gradients":
        (CLASS, f"{CLASS}    zero_grad = lambda self, to_none=True: self.inside.zero_grad(to_none)\n"),
    "no torch.optim.Optimizer": (CLASS, f"{CLASS}    __new__ = lambda *_, **__: object()\n"),
    "param_groups hold [35] parameters of 8":
        ("self.owners |= owners", lines("self.owners |= owners", "group['params'] = mine['params']")),
    "param_groups have no 'lr'": (SUPER, lines(SUPER, "self.param_groups[0].pop('lr')")),
    "rank 0, 1: with AdamW, step 1: parameter 0 .* as before the step.* src=owner":
        ("src=owner", "src=(owner + 1) % self.world_size"),
    "2 of 2 broadcasts may still be under way": ("handle.wait()", "pass"),
    "the ranks keep 17408 bytes of states, one optimizer 8704. .* what it owns":
        ("if owners[p] == self.rank]", "]", BROADCASTS, "[]"),
    "rank 1 keeps 94% of the states. Assign by bytes":
        ("parameter: -parameter.nbytes", "_: 0", "load.index(min(load))", "len(owners) % world_size"),
    "called the closure 0 times": ("closure() if", "None if"),
    "under no_grad": ("with torch.enable_grad():", "with torch.no_grad():"),
    "returned None": ("return loss", "return None"),
    "with two groups, parameter 0 .* each with its settings":
        ("super().add_param_group(group)", "super().add_param_group({**group, **self.settings})"),
    "changes of settings .* as schedulers make them, parameter 0 ": NO_UPDATE,
    "changes of settings .* parameter 1 .* into all groups":
        ("in zip(self.param_groups,", "in zip(self.param_groups[:1],", ", strict=True", ""),
    "the ranks keep 2176 bytes of states, one optimizer 8704":
        (JOINS, lines("mine['params'] = [] if self.inside.state else mine['params']", f"    {JOINS}")),
    "after add_param_group, parameter 1 .* keep the first group's states":
        (JOINS, lines(JOINS, "    self.inside.state.clear()")),
    "the ranks keep 15232 bytes": ("if owners[p] ==", "if self.inside or owners[p] =="),
    "parameter 0 .* not what one optimizer alone makes of it": (BROADCASTS, lines("[]", ROUNDED)),
}  # fmt: skip
GATHER = "weight.work = all_gather(weight.all_rows, weight.sent, async_op=True)"
ARRIVED = "wanted[0].work.wait()"
GRADIENT = "weight.shard.grad = mine.to(weight.shard.dtype)"
MEAN = "weight.whole.grad / dist.get_world_size()"
BEHIND = "self.collect(behind[::-1])"
MY_FSDP = "class MyFSDP(ShortFSDP):\n"
FREE_IN_BACKWARD = "weight.whole.grad = None\n        weight.free()"
REPLICATED = "if parameter not in shards\n        ]\n"
FREE_BEFORE_FORWARD = """    def forward(self, *inputs):
        for weight in self.weights:
            if weight.work is not None:
                weight.work.wait()
                weight.free()
        return super().forward(*inputs)
"""
FSDP = {
    "^$": (),
    "`.mod": ("self.module = module\n", "self.module = torch.nn.Sequential(module)\n"),
    "'embedding.weight' is not that of rank 0. Broadcast": ("dist.broadcast(parameter.data, src=0)", "pass"),
    "it has no 'embedding.weight'": (" return full\n", " return {'w': full['norm.weight']}\n"),
    "'up.weight' is not that of rank 0.* without padding": ("rows[: len(weight.whole)]", "rows"),
    "rank 1: collect of rank 0 waits for more than the first":
        (ARRIVED, "[weight.work.wait() for weight in wanted]"),
    "rank 0, 1: rank 0 is held up by others that are still at 'head'":
        (BEHIND, lines(BEHIND, "[weight.work.wait() for weight in behind]")),
    "'embedding.weight' still has 288 of 288 elements.* rows, 144":
        ("torch.cat([mine, padding])", "full.clone()",
         "all_gather(rows, weight.shard.detach())", "rows = weight.shard"),
    "'norm.weight' was sharded. Leave":
        ("names[parameter]: parameter.detach()", "names[parameter]: parameter.detach().expand(132)",
         REPLICATED, lines(REPLICATED, "for p in self.replicated: p.data = p.data[:1]\n")),
    r"\(24, 12\), torch.float32, its shard \(12, 12\)":
        (GRADIENT, lines("shard, weight.shard.data = weight.shard.data, torch.zeros_like(weight.whole)",
         "    weight.shard.grad = torch.zeros_like(weight.shard)", "    weight.shard.data = shard")),
    "'embedding.weight' is averaged twice": (MEAN, f"{MEAN} ** 2"),
    r"\d+ of \d+ reduce-scatter.* may still be under way": ("            work.wait()", "            pass"),
    "whole gradient of 'head' went through all_reduce":
        ("work = reduce_scatter(mine, all_rows, async_op=True)",
         "work, mine = dist.all_reduce(all_rows, async_op=True), all_rows.chunk(2)[dist.get_rank()]"),
    "second forward is not the module's.* as it is now":
        (lines("weight.layer.weight = weight.shard", "weight.free()"), "weight.layer.weight = weight.shard"),
    "after backward up still have whole tensors; allowed: 0":
        (FREE_IN_BACKWARD, lines("weight.whole.grad = None", "len(weight.whole) == 60 or weight.free()"),
         MY_FSDP, MY_FSDP + FREE_BEFORE_FORWARD),
    "in forward .* 'up' starts only when its layer begins": ("place : place + 3", "place : place + 1"),
    "rank 1: collect of rank 0 waits for":
        (GATHER, lines("all_gather(weight.all_rows, weight.sent)", "weight.work = True"), ARRIVED, "pass"),
    "in backward .* 'down' starts only when": ("max(place - 2, 0) : place", "place : place"),
    "'embedding' is gathered in torch.float32. Cast":
        (ARRIVED, lines(ARRIVED, "wanted[0].all_rows.copy_(wanted[0].arrived)"),
         "self.work = None", "self.work = self.arrived = None",
         GATHER, lines("weight.arrived = torch.empty_like(weight.all_rows, dtype=torch.float32)",
         "weight.work = all_gather(weight.arrived, weight.shard.detach(), async_op=True)")),
    "'embedding.weight' is no longer what it was":
        ("weight.sent = weight.shard",
         "weight.shard.data = weight.shard.to(weight.all_rows.dtype).float(); weight.sent = weight.shard"),
    "the shard of 'embedding.weight' is torch.bfloat16":
        ("dist.get_rank(), ranks)", "dist.get_rank(), ranks).to(compute_dtype or full.dtype)"),
    "torch.bfloat16, its shard .* torch.float32":
        (GRADIENT, "weight.shard.grad_dtype = None; weight.shard.grad = mine.to(weight.all_rows.dtype)"),
}  # fmt: skip
SUM = "return Sum.apply(hidden @ self.w2.T, self.group)"
TENSOR = {
    "^$": (),
    "output is only this rank's term. All-reduce": (SUM, "return hidden @ self.w2.T"),
    "gradient of w1 is 2 times too large":
        ("return grad, None", "torch.distributed.all_reduce(grad := grad.clone()); return grad, None"),
    "gradient of w1 is missing":
        (SUM, "return Sum.apply((hidden @ self.w2.T).detach(), None).requires_grad_()"),
    r"w2, .*3, 10.* is not .* of its columns": ('dim=1 if name == "w2" else 0', "dim=0"),
    "rank 1: w3, .* is not the slice": ("name, rank, ranks)\n", "name, rank * (name != 'w3'), ranks)\n"),
    "group of this rank alone, w1, .* Use the group": ("self.group = group", "self.group = group = None"),
    "rank alone, the gradient of the input is not": ("ctx.group = group", "ctx.group = None"),
    "`.w1` is no nn.Parameter": ("torch.nn.Parameter(piece.clone())", "piece.clone()"),
}  # fmt: skip


# Notebook and solution, checker, and what is said.
GROUPS = {
    "ddp": ("35", "ShortOverlap", partial(checks.check_ddp.__wrapped__, overlapped=True), DDP),
    "optimizer": ("41", "AsyncSharded", checks.check_sharded_optimizer.__wrapped__, OPTIMIZER),
    "fsdp": ("43", "MyFSDP", checks.check_fsdp.__wrapped__, FSDP),
    "tensor": ("55", "TensorParallelSwiGLU", checks.check_tensor_parallel.__wrapped__, TENSOR),
}


@cache
def failures(group):
    """What is said of each candidate of a group, all of them in one launch: none may disturb the next."""

    # In here, so that it is sent by value.
    def try_all(context, jobs):
        return {name: " ".join(try_properties(context, job)) for name, job in jobs.items()}

    number, name, properties, candidates = GROUPS[group]
    solution = written(number, name)
    jobs = {
        sentence: cloudpickle.dumps((solution.made(*changes), properties))
        for sentence, changes in candidates.items()
    }
    return launch(try_all, 2, jobs, backend="gloo", timeout_s=200)[0]


SENTENCES = [(group, sentence) for group in GROUPS for sentence in GROUPS[group][-1]]


@pytest.mark.parametrize(("group", "sentence"), SENTENCES)
def test_each_mistake_is_named(group, sentence):
    mistakes = failures(group)[sentence]
    assert re.search(sentence, mistakes), mistakes


@pytest.mark.parametrize(
    ("changes", "timeout_s", "named"),
    [
        ((FINISH, lines("raise KeyError('oh')", FINISH)), 60, "raised KeyError: 'oh'"),
        ((FINISH, lines("while True: pass", FINISH)), 4, "not done within 4 s"),
        ((FINISH, lines("raise SystemExit", FINISH)), 60, "SystemExit"),
    ],
)
def test_what_does_not_get_through_is_one_sentence(changes, timeout_s, named, capsys):
    candidate = written("35", "ShortOverlap").made(*changes)
    with checks.step("step"):
        checks.check_ddp(candidate, timeout_s=timeout_s, world_size=1)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗")]
    assert named in line


def test_less_or_more_can_be_asked_for(capsys):
    unsent = written("41", "AsyncSharded").made(BROADCASTS, "[]")
    checks.check_sharded_optimizer(unsent, only_states=True)
    assert "3 cases right" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="three backward passes"):
        checks.check_ddp(written("35", "ShortOverlap").made(), thorough=True)
    not_ahead = written("43", "MyFSDP").made("place : place + 3", "place : place + 1")
    checks.check_fsdp(not_ahead, only=("shards", "forward"))
    with pytest.raises(AssertionError, match=r"rank 0, 1: in forward .* 'up'"):
        checks.check_fsdp(not_ahead, only=("prefetch",))
    with pytest.raises(AssertionError, match="'speed' is unknown; allowed: shards, forward"):
        checks.check_fsdp(not_ahead, only=("speed",))
    for world_size in (1, 3):
        checks.check_gather_linear(
            written("55", "GatherLinear").made(),
            world_size=world_size,
        )
