"""Collectives that are watched and carried out as rings; what layers send is asked in notebooks 53 to 56."""

import pytest
import torch
import torch.distributed as dist

from cs336_systems.accounting import sharding_costs
from cs336_systems.configs import model_size
from cs336_systems.parallel import SHARDINGS, launch
from cs336_systems.parallel.ddp import ALL_GATHER, REDUCE_SCATTER
from cs336_systems.parallel.steps import sharded_steps
from cs336_systems.traffic import watch_collectives


def sent_and_left_out(context):
    """What a step calls, and what it leaves of a tensor, when messages are sent and when not."""
    results = []
    for send in (True, False):
        tensor = torch.full((4,), float(context.rank))
        gathered = torch.full((8,), -1.0)
        with watch_collectives(send=send) as messages:
            work = dist.all_reduce(tensor, async_op=True)
            # FSDP2 waits for nothing else.
            assert not send or isinstance(work, dist.Work)
            work.wait()
            getattr(dist, ALL_GATHER)(output_tensor=gathered, input_tensor=tensor)
        calls = [(each.collective, each.bytes, each.dtype) for each in messages]
        results.append((calls, tensor.tolist(), gathered.tolist()))
    return results


def test_collectives_are_seen_and_can_be_left_out():
    (sent, left_out), _ = launch(sent_and_left_out, 2, backend="gloo")
    calls = [("all_reduce", 16, torch.float32), ("all_gather", 32, torch.float32)]
    assert sent == (calls, [1.0] * 4, [1.0] * 8)
    assert left_out == (calls, [0.0] * 4, [-1.0] * 8)


def as_rings(context):
    """What an all-reduce of five numbers, and others of six, leave on this rank; and how many it sends."""
    uneven = torch.full((5,), float(context.rank))
    even = torch.full((6,), float(context.rank))
    gathered = torch.empty(6)
    piece = torch.empty(2)
    with watch_collectives(as_rings=True) as messages:
        dist.all_reduce(uneven)
        getattr(dist, ALL_GATHER)(gathered, even[:2])
        getattr(dist, REDUCE_SCATTER)(piece, even, op=dist.ReduceOp.AVG)
        dist.broadcast(even, src=1)
    sent_bytes = [message.sent_bytes for message in messages]
    return {
        "uneven": uneven,
        "gathered": gathered,
        "piece": piece,
        "even": even,
        "sent": sum(sent_bytes) // 4,
    }


def test_rings_do_what_the_collectives_do_and_count_their_sends():
    by_rank = launch(as_rings, 3, backend="gloo")
    for results in by_rank:
        assert results["uneven"].tolist() == [3.0] * 5
        assert results["gathered"].view(3, 2).mean(1).tolist() == [0.0, 1.0, 2.0]
        assert results["piece"].tolist() == [1.0] * 2
        assert results["even"].tolist() == [1.0] * 6
    # Of parts of 2, 2 and 1 numbers each passes on two, twice; then four, four, and six but for the last.
    sent = [results["sent"] for results in by_rank]
    assert sent == [6 + 8, 7 + 14, 7 + 14]


def reduced_by_fsdp2(context, dtype):
    """The gradients that a step reduces, in bytes by dtype."""
    shape = {"context_length": 16, "batch_size": 2, "attention": "sdpa"}
    run = sharded_steps(model_size("tiny"), SHARDINGS["fsdp2"], context, dtype=dtype, **shape)
    reduced = {}
    with watch_collectives() as messages:
        run.train_step()
    for message in messages:
        if message.collective == "reduce_scatter":
            reduced[message.dtype] = reduced.get(message.dtype, 0) + message.bytes
    return reduced


def test_fsdp2_reduces_in_the_dtype_that_it_computes_in():
    """PyTorch 2.15 would reduce in float32 where nobody tells it, with no other sign than the bytes."""
    costs = sharding_costs.sent_bytes(model_size("tiny"), SHARDINGS["fsdp2"], 2, "bfloat16")
    for reduced in launch(reduced_by_fsdp2, 2, "bfloat16", backend="gloo"):
        # A ring of two ranks passes on half of what each holds.
        assert reduced == {torch.bfloat16: pytest.approx(2 * costs["reduce_scatter"], rel=5e-3)}
