"""Checkpointing policies: the same gradients, and exactly the memory and the reruns that the model says."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.accounting.checkpoint_costs import peak, recomputed
from cs336_systems.configs import ModelConfig
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.training.checkpointing import every_k, forward_with, policy, recursive, run
from cs336_systems.training.steps import ModelSteps

NAMES = ("none", "every 1", "every 2", "every 3", "sqrt_n", "recursive", "from start")
POLICIES = {name: policy(name) for name in NAMES}


def uneven(blocks):
    """Of six blocks or more: one kept, a segment, and a segment in a segment."""
    inner = tuple(blocks[3:5])
    return blocks[0], tuple(blocks[1:3]), (inner,) + tuple(blocks[5:])


POLICIES["uneven"] = uneven
INSIDE = 1000
BOUNDARY = 100


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("name", POLICIES)
def test_reruns_are_exact(name, count):
    """Peaks: `test_schedules_in_closed_form`, and tests/accounting/test_accounting.py."""
    if name == "uneven":
        count += 5  # as many as it has parts
    calls = []

    def block(x):
        calls.append(1)
        return x.sin()

    schedule = POLICIES[name]([block] * count)
    y = run(schedule, torch.zeros(1, requires_grad=True))
    in_forward = len(calls)
    y.sum().backward()
    assert in_forward == count
    assert len(calls) - in_forward == recomputed(schedule)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = ModelConfig("deep", 2025, 32, 64, num_layers=6, num_heads=2, vocab_size=64)
    return build_model(config, 16)


@pytest.mark.parametrize("name", list(POLICIES) + ["half blocks", "selective"])
def test_gradients_are_equal_to_the_last_bit(model, name):
    tokens = torch.arange(32).view(2, 16)

    def gradients(logits):
        model.zero_grad(set_to_none=True)
        cross_entropy(logits, tokens).backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients(model(tokens))
    chosen = POLICIES[name] if name in POLICIES else policy(name)
    checkpointed = gradients(forward_with(model, chosen, tokens))
    assert all(map(torch.equal, plain, checkpointed))


def test_selective_runs_attention_again_and_no_linear_layer(model):
    flops = {}
    for name in ("none", "every 1", "selective"):
        with FlopCounterMode(display=False) as counter:
            steps = ModelSteps(model, 2, 16, "bfloat16", call=partial(called_with, name))
            steps.forward_backward()
        flops[name] = counter.get_flop_counts()["Global"]
    plain, whole, selective = flops.values()
    # Of linear layers, of attention.
    mm = torch.ops.aten.mm
    bmm = torch.ops.aten.bmm
    assert plain[mm] == selective[mm] < whole[mm]
    assert selective[bmm] == whole[bmm] == plain[bmm] * 4 // 3


def costs(schedule):
    return peak(schedule, INSIDE, BOUNDARY), recomputed(schedule)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 10))
def test_schedules_in_closed_form(count, k, depth):
    """Segments hold their input; the one that backward is at is there in full."""
    segments, last = divmod(count, k)
    whole = INSIDE + BOUNDARY
    full = (segments - 1) * BOUNDARY + k * whole if segments else 0
    short = segments * BOUNDARY + last * whole if last else 0
    assert costs(every_k(range(count), k)) == (max(full, short), count)
    # A segment's last segment is not run again with it, so the reruns halve against N log2 N.
    reruns = 2**depth * (1 + (depth - 1) / 2)
    deepest = INSIDE + (depth + 1) * BOUNDARY
    assert costs(recursive(range(2**depth))) == (deepest, reruns)
    reruns = count * (count + 1) // 2
    from_start = policy("from start")
    assert costs(from_start(range(count + 1))) == (INSIDE + 2 * BOUNDARY, reruns)


@pytest.mark.parametrize("name", ["every 0", "every ²", "every -1", "sometimes"])
def test_a_policy_that_there_is_not_is_refused(name):
    with pytest.raises(ValueError, match=f"policy '{name}' is unknown; allowed: every 1"):
        policy(name)


def called_with(name, model, tokens):
    return forward_with(model, policy(name), tokens)
