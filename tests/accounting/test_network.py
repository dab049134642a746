"""The simulated ring: its closed form, and what one slow link does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.accounting import ring_seconds

COLLECTIVES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@given(
    st.sampled_from(list(COLLECTIVES)),
    st.integers(1, 40),
    st.floats(0, 1e9),
    st.floats(0, 1),
    st.floats(1e3, 1e9),
)
def test_equal_links_give_the_closed_form(collective, n, size, hop_s, rate):
    """A latency for every hop, and every part of the tensor over n - 1 links; twice in an all-reduce."""
    hop = hop_s + size / n / rate
    wanted = COLLECTIVES[collective] * (n - 1) * hop
    assert ring_seconds(collective, size, n, rate, hop_s) == pytest.approx(wanted)


@pytest.mark.parametrize("hop_s", [0.0, 0.5, 1e4])
def test_one_slow_link_sets_the_pace(hop_s):
    """So much does it matter as bytes matter beside latency."""
    rates = np.full(4, 4.0)
    rates[2] = 1.0
    slow = ring_seconds("all_reduce", 840.0, 4, 1.0, hop_s)
    assert ring_seconds("all_reduce", 840.0, 4, rates, hop_s) == pytest.approx(slow)
