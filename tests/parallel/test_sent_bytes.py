"""The bytes that sharded layers really send, against the closed forms; and collectives that are watched."""

from collections import Counter

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from cs336_systems.parallel import TensorParallelSwiGLU, count_sent_bytes, launch, watch_collectives
from cs336_systems.parallel.ddp import ALL_GATHER

SIZES = {"d_model": 8, "d_ff": 24, "tokens": 12}
MESHES = [(1, 2), (1, 4), (4, 1), (2, 2)]  # of one launch


def sharded_layer(full, mesh):
    layer = TensorParallelSwiGLU(full, mesh.get_group("y")) if mesh.size(1) > 1 else full
    return fully_shard(layer, mesh=mesh["x"], reshard_after_forward=True) if mesh.size(0) > 1 else layer


def test_every_rank_of_a_sharded_layer_sends_the_bytes_of_the_closed_form():
    """Around rings: 3 D F / Y weights gathered and scattered along X, B D / X activations summed along Y."""
    rows = count_sent_bytes({"sharded": sharded_layer}, MESHES, **SIZES)
    assert max(row["error"] for row in rows) < 0.02  # bfloat16 has 8 bits
    d_model, d_ff, tokens = SIZES.values()
    for x, y in MESHES:
        weights = 2 * 3 * d_model * d_ff // y * (x - 1) // x
        sums = {"all_reduce": 2 * 2 * tokens // x * d_model * (y - 1) // y}
        for pass_, scatters in (("forward", {}), ("backward", {"reduce_scatter": weights})):
            sends = {"all_gather": weights, **scatters, **sums}
            expected = Counter({(name, sent): 1 for name, sent in sends.items() if sent})
            for rank in range(x * y):
                case = (x, y, rank, pass_)
                mine = [row for row in rows if (row["X"], row["Y"], row["rank"], row["pass"]) == case]
                found = Counter((row["collective"], row["sent_bytes"]) for row in mine)
                assert found == expected, case


@pytest.mark.parametrize("meshes", [[], [(0, 2)], [(5, 1)]])
def test_what_cannot_be_counted_is_refused(meshes):
    with pytest.raises(ValueError, match="X dividing the 12 tokens"):
        count_sent_bytes({}, meshes, **SIZES)


def sent_and_left_out(context):
    """What a step calls, and what it leaves of a tensor, when messages are sent and when not."""
    found = []
    for send in (True, False):
        tensor = torch.full((4,), float(context.rank))
        gathered = torch.full((8,), -1.0)
        with watch_collectives(send=send) as messages:
            work = torch.distributed.all_reduce(tensor, async_op=True)
            assert not send or isinstance(work, torch.distributed.Work)  # FSDP2 waits for nothing else
            work.wait()
            gather = getattr(torch.distributed, ALL_GATHER)
            gather(output_tensor=gathered, input_tensor=tensor)
        seen = [(message.collective, message.bytes, message.dtype) for message in messages]
        found.append((seen, tensor.tolist(), gathered.tolist()))
    return found


def test_collectives_are_seen_and_can_be_left_out():
    (sent, left_out), _ = launch(sent_and_left_out, 2, backend="gloo")
    assert sent[0] == left_out[0] == [("all_reduce", 16, torch.float32), ("all_gather", 32, torch.float32)]
    assert sent[1:] == ([1.0] * 4, [1.0] * 8)
    assert left_out[1:] == ([0.0] * 4, [-1.0] * 8)
