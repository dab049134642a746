"""check_fsdp passes what is right, and names each classic mistake."""

import re

import broken_fsdp
import pytest

from cs336_systems.checks.fsdp_checks import cases, check_fsdp
from cs336_systems.parallel import FSDP

BROKEN, CASES = broken_fsdp, cases()
# What the sentence about each mistake must name.
SENTENCES = {
    "Right": "nothing",
    "HidesTheModule": "`.module` ",
    "ForgetsToBroadcast": "'embedding.weight' is not that of rank 0. Broadcast",
    "GathersInTheWrongOrder": "in the order of the ranks",
    "NamesNothing": r"gather_full_parameters\(\) has no 'scale': it has module.scale",
    "KeepsTheWhole": "'embedding.weight' still has 288 of 288 elements; a rank's share is 144",
    "ShardsTheNormsToo": "'scale' was sharded. Leave",
    "ForgetsToPutShardsBack": r"after forward, parameters\(\) are not the shards",
    "DoesNotWaitForGathers": r"'embedding' computes while its weight .* wait\(\)",
    "LeavesFullGradients": r"gradient of 'embedding.weight' has shape \(24, 12\) and its shard \(12, 12\)",
    "ForgetsToAverage": "gradient of 'embedding.weight' is the sum over the ranks. Divide",
    "AveragesTwice": "gradient of 'embedding.weight' is averaged twice",
    "ForgetsTheNorms": "gradient of 'scale' is still this rank's own",
    "KeepsItsOwnRows": "gradient of 'embedding.weight' is not the mean",
    "ForgetsToWaitForReductions": r"\d+ of \d+ reduce-scatter.* may still be under way",
    "AllReduces": "whole gradient of 'head' went through all_reduce",
    "NeverGathersAgain": "with the weights from before the optimizer's step. Gather from the shards",
    "KeepsTheFirstWeight": "with 'embedding.weight' from before the optimizer's step",
    "KeepsUntilBackward": r"after forward the whole weights .*resize_\(0\)",
    "ForgetsToFreeInBackward": "after backward the whole weights of these layers still have memory: wide",
    "NoPrefetch": "all-gather of 'up' starts only when its layer begins",
    "WaitsAtOnce": "all-gather of 'embedding' is waited for where it starts",
    "GathersEverythingFirst": "'down' is gathered before .* two layers ahead",
    "PrefetchesOnlyForward": "in backward the all-gather of 'embedding' starts only",
    "SendsFloat32": "'embedding' is gathered in torch.float32. Cast",
    "LeavesLowGradients": "gradient of 'embedding.weight' is torch.bfloat16 and its shard torch.float32",
    "CastsOnce": "bfloat16, forward computes with the weights from before .* cast anew",
    "RoundsItsShards": "'embedding' is kept in torch.bfloat16, where small updates are lost",
    "LowShards": "the shard of 'embedding.weight' is torch.bfloat16",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_mistake_is_named(failures, name):
    assert re.search(SENTENCES[name], " ".join(failures[name]) or "nothing")


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}])
def test_ours_passes_where_most_is_asked(options, capsys):
    check_fsdp(FSDP, world_size=3, thorough=True, **options)
    shown = capsys.readouterr().out.splitlines()
    assert all(line.startswith("✓ ") for line in shown[:-1])
    assert shown[-1] == "FSDP: 12 cases right on 3 ranks"


def test_parts_can_be_asked_for():
    check_fsdp(broken_fsdp.NoPrefetch, only=("shards", "forward"))
    with pytest.raises(AssertionError, match="NoPrefetch, rank 0, 1: the all-gather of 'up'"):
        check_fsdp(broken_fsdp.NoPrefetch, only=("prefetch",))
    with pytest.raises(ValueError, match="'speed' is unknown; allowed: shards, forward"):
        check_fsdp(broken_fsdp.Right, only=("speed",))
