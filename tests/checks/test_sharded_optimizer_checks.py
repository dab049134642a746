"""check_sharded_optimizer passes what is right, and names each classic mistake."""

import re

import broken_sharded_optimizer
import pytest

from cs336_systems.checks.sharded_optimizer_checks import cases, check_sharded_optimizer
from cs336_systems.parallel import ShardedOptimizer

BROKEN, CASES = broken_sharded_optimizer, cases(thorough=True)
# What the sentence about each mistake must name.
SENTENCES = {
    "Right": "nothing",
    "NoOptimizer": "no torch.optim.Optimizer",
    "KeepsOnlyItsShard": "param_groups hold 4 parameters and were given 8",
    "NoSettingsOutside": "param_groups have no 'lr'",
    "LosesTheSettings": "parameter 0 .* the settings were AdamW's defaults",
    "ForgetsToSend": "parameter 0 .* updated on rank 0 alone.* broadcast",
    "SendsFromTheWrongRank": "parameter 0 .* as before the step, on every rank.* src=owner",
    "ForgetsToWait": "8 of 8 broadcasts may still be under way",
    "UpdatesTwice": "updated twice",
    "SharesNothing": "ranks 0, 1 keep states of parameter 0 .* only the parameters that this rank owns",
    "DealsByTurns": "rank 0 keeps 94% of the states. Deal by bytes",
    "FillsGradients": "without a gradient was given one",
    "DecaysWithoutGradient": "without a gradient was changed",
    "IgnoresTheClosure": "called the closure 0 times",
    "RunsTheClosureTwice": "called the closure 2 times",
    "ClosureWithoutGradients": "under no_grad",
    "LosesTheLoss": "returned None",
    "ClearsItsShard": r"after zero_grad\(\) 4 of 8 gradients",
    "LosesGroupSettings": "with two groups, parameter 0 .* each with its settings",
    "DeafToSchedulers": "change of .* as a scheduler makes it",
    "ForgetsLaterGroups": "group that was added after a step are not trained",
    "StartsAnewWithEachGroup": "after add_param_group, parameter 0 .* keep the first one's states",
    "SharesOnlyTheFirstGroup": "ranks 0, 1 keep states of parameter 4",
    "MixesUpDtypes": "parameter 0 .* not what one optimizer alone makes of it",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_mistake_is_named(failures, name):
    assert re.search(SENTENCES[name], " ".join(failures[name]) or "nothing")


def test_ours_passes_where_most_is_asked(capsys):
    check_sharded_optimizer(ShardedOptimizer, world_size=3, thorough=True, bucket_size_mb=1e-3)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 12
    assert all(line.startswith("✓ ") for line in shown[:-1])
    assert shown[-1] == "ShardedOptimizer: 11 cases right on 3 ranks"


def test_states_can_be_asked_for_alone(capsys):
    check_sharded_optimizer(broken_sharded_optimizer.ForgetsToSend, only_states=True)
    assert "ForgetsToSend: 3 cases right" in capsys.readouterr().out


def test_a_mistake_follows_what_holds(capsys):
    with pytest.raises(AssertionError, match=r"^DealsByTurns, rank 0, 1: rank 0 keeps 94%"):
        check_sharded_optimizer(broken_sharded_optimizer.DealsByTurns)
    assert len(capsys.readouterr().out.splitlines()) == 2
