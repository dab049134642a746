"""Bytes of a step with sharded optimizer states, against the closed forms."""

import pytest
import torch

from cs336_systems.bench import count_optimizer_bytes
from cs336_systems.parallel import BucketedDDP, ReduceScatterDDP, ShardedOptimizer
from cs336_systems.parallel.adapters import torch_zero


def whole(module):
    return BucketedDDP(module, 25), torch.optim.AdamW(module.parameters())


def zero(module):
    return BucketedDDP(module, 25), torch_zero(module.parameters(), torch.optim.AdamW)


def sharded(module):
    return BucketedDDP(module, 25), ShardedOptimizer(module.parameters(), torch.optim.AdamW)


def of_the_paper(module):
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    return ReduceScatterDDP(module, optimizer), optimizer


def test_a_step_sends_and_keeps_what_the_closed_forms_say():
    implementations = {"whole": whole, "zero": zero, "sharded": sharded, "paper": of_the_paper}
    rows = count_optimizer_bytes(implementations, 2)
    total_mb = 689_408 / 2**20  # the parameters of "tiny"
    sent = {}
    for row in rows:
        sent.setdefault(row["implementation"], {}).setdefault(row["collective"], []).append(row["sent_mb"])
        assert row["max_difference"] == 0
        shard = 2 * total_mb / (1 if row["implementation"] == "whole" else 2)
        assert row["state_mb"] == pytest.approx(shard, rel=0.01)
    half = {
        name: {collective: sum(sizes) / 2 / (total_mb / 2) for collective, sizes in collectives.items()}
        for name, collectives in sent.items()
    }
    near = {name: pytest.approx(n, rel=0.02) for name, n in (("one", 1), ("two", 2))}
    assert half == {
        "whole": {"all_reduce": near["two"]},
        "zero": {"all_reduce": near["two"], "broadcast": near["one"]},
        "sharded": {"all_reduce": near["two"], "all_gather": near["one"]},
        "paper": {"reduce_scatter": near["one"], "all_gather": near["one"]},
    }


def test_the_step_that_is_counted_is_not_the_first():
    with pytest.raises(ValueError, match="steps is 1; allowed"):
        count_optimizer_bytes({}, 2, steps=1)
