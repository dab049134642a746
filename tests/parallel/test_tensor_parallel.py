"""What the tensor-parallel layer promises beyond what its checker asks."""

import tensor_parallel_workers

from cs336_systems.parallel import launch


def test_it_keeps_its_promises():
    launch(tensor_parallel_workers.run_all, 2, backend="gloo", timeout_s=60)
