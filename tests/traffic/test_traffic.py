"""Collectives that are watched; what they send in sharded layers is in notebooks 53 to 56."""

import pytest
import torch

from cs336_systems.parallel import launch
from cs336_systems.parallel.ddp import ALL_GATHER
from cs336_systems.traffic import count_sent_bytes, watch_collectives


@pytest.mark.parametrize("meshes", [[], [(0, 2)], [(5, 1)]])
def test_what_cannot_be_counted_is_refused(meshes):
    with pytest.raises(ValueError, match="X dividing the 12 tokens"):
        count_sent_bytes({}, meshes, d_model=8, d_ff=24, tokens=12)


def sent_and_left_out(context):
    """What a step calls, and what it leaves of a tensor, when messages are sent and when not."""
    found = []
    for send in (True, False):
        tensor = torch.full((4,), float(context.rank))
        gathered = torch.full((8,), -1.0)
        with watch_collectives(send=send) as messages:
            work = torch.distributed.all_reduce(tensor, async_op=True)
            assert not send or isinstance(
                work, torch.distributed.Work
            )  # FSDP2 waits for nothing else
            work.wait()
            getattr(torch.distributed, ALL_GATHER)(output_tensor=gathered, input_tensor=tensor)
        seen = [(message.collective, message.bytes, message.dtype) for message in messages]
        found.append((seen, tensor.tolist(), gathered.tolist()))
    return found


def test_collectives_are_seen_and_can_be_left_out():
    (sent, left_out), _ = launch(sent_and_left_out, 2, backend="gloo")
    assert (
        sent[0]
        == left_out[0]
        == [("all_reduce", 16, torch.float32), ("all_gather", 32, torch.float32)]
    )
    assert sent[1:] == ([1.0] * 4, [1.0] * 8)
    assert left_out[1:] == ([0.0] * 4, [-1.0] * 8)
