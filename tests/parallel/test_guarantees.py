"""What autograd and PyTorch's optimizers guarantee holds under every wrapper, or is refused in a sentence."""

import guarantee_workers
import pytest

from cs336_systems.parallel import launch


@pytest.mark.parametrize(
    "number", range(len(guarantee_workers.CHECKS)), ids=[check.__name__ for check in guarantee_workers.CHECKS]
)
def test_on_two_ranks(number):
    launch(guarantee_workers.run, 2, number, backend="gloo", timeout_s=120)
