"""Workers for the tests of collectives that are watched."""

import torch

from cs336_systems.measure.collective_calls import watch_collectives
from cs336_systems.parallel.ddp import ALL_GATHER


def sent_and_left_out(context):
    """What a step calls, and what it leaves of a tensor, when messages are sent and when not."""
    found = []
    for send in (True, False):
        tensor = torch.full((4,), float(context.rank))
        gathered = torch.full((8,), -1.0)
        with watch_collectives(send=send) as messages:
            work = torch.distributed.all_reduce(tensor, async_op=True)
            work.wait()
            gather = getattr(torch.distributed, ALL_GATHER)
            gather(output_tensor=gathered, input_tensor=tensor)
        found.append(
            ([(m.collective, m.bytes, m.dtype) for m in messages], tensor.tolist(), gathered.tolist())
        )
    return found
