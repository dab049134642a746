"""The simulator of devices and links: closed forms, what waits for what, and its cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.accounting.network import SIMULATED, Links, collective_finish

DEVICES = st.integers(1, 40)
BYTES = st.floats(0, 1e9)
HOPS = st.floats(0, 1)
RATES = st.floats(1e3, 1e9)
SIZE = 840.0
RATE = 4.0
HOP = 0.5
LINKS = Links(RATE, HOP)


def ring_seconds(collective, size, n, hop_s, bytes_per_s):
    """A latency for every hop, and every part of the tensor over n - 1 links; twice in an all-reduce."""
    rounds = 2 if collective == "all_reduce" else 1
    hop = hop_s + size / n / bytes_per_s
    return rounds * (n - 1) * hop


@given(st.sampled_from(SIMULATED), DEVICES, BYTES, HOPS, RATES)
def test_equal_links_give_the_closed_form_of_a_ring(collective, n, size, hop, rate):
    finish = collective_finish(collective, size, (n,), Links(rate, hop))
    seconds = ring_seconds(collective, size, n, hop, rate)
    assert finish == pytest.approx(seconds)


def test_lines_of_a_mesh_run_by_themselves():
    mesh = (4, 3)
    links = (LINKS, LINKS)
    ready = np.zeros(mesh)
    ready[:, 1] = 700.0  # late, so that along rows all wait for it
    finish = collective_finish("all_gather", SIZE, mesh, links, axis=0, ready=ready)
    alone = ring_seconds("all_gather", SIZE, 4, HOP, RATE)
    assert finish - ready == pytest.approx(np.full(mesh, alone))
    along_rows = collective_finish("all_gather", SIZE, mesh, links, axis=1, ready=ready)
    row = collective_finish("all_gather", SIZE, (3,), LINKS, ready=ready[0])
    assert along_rows.tolist() == 4 * [row.tolist()]


def test_one_slow_link_sets_the_pace_of_its_own_ring_alone():
    """As if all of that ring were slow; and so much does it matter as bytes matter beside latency."""
    rates = np.full((4, 3), 4.0)
    rates[2, 1] = 1.0
    for hop in (0.0, 0.5, 1e4):
        links = (Links(rates, hop), LINKS)
        finish = collective_finish("all_reduce", SIZE, (4, 3), links, axis=0)
        slow = ring_seconds("all_reduce", SIZE, 4, hop, 1.0)
        fast = ring_seconds("all_reduce", SIZE, 4, hop, RATE)
        assert finish.max(axis=0) == pytest.approx([fast, slow, fast])


@given(DEVICES.filter(lambda n: n > 1), st.floats(0, 1e3))
def test_nobody_has_the_sum_before_the_last_has_come(n, late):
    ready = np.zeros(n)
    ready[n // 2] = late
    finish = collective_finish("all_reduce", SIZE, (n,), LINKS, ready=ready)
    alone = collective_finish("all_reduce", SIZE, (n,), LINKS).max()
    assert finish.min() >= late
    assert finish.max() <= late + alone * (1 + 1e-12)
