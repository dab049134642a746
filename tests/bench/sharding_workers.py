"""Workers for the tests of the sharding bench."""

from dataclasses import replace
from unittest.mock import patch

import torch

from cs336_systems.bench import sharding_bench
from cs336_systems.measure.collective_calls import watch_collectives
from cs336_systems.parallel.ddp import ALL_GATHER


def measure_with_too_little_memory(context, keys, poor):
    """Rows that are sent when memory runs out with one of the strategies."""
    rows = []
    made = sharding_bench.ShardedSteps

    def steps(key, context):
        if key["implementation"] == poor:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(key, context)

    with patch.object(sharding_bench, "ShardedSteps", steps):
        sharding_bench._measure_all(replace(context, send=rows.append), keys, 2, 2)
    return [row for table, of_table in rows if table == "sharding_times" for row in of_table]


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
