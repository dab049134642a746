"""The simulator of devices and links: closed forms, what waits for what, and its cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.accounting.network import SIMULATED, Links, Task, collective_finish, run_tasks

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


def test_tasks_wait_for_their_lane_and_for_each_other():
    message = {"collective": "all_reduce", "message_bytes": SIZE}
    tasks = [
        Task("backward 2", "compute", 10.0),
        Task("sum 2", "x", after=("backward 2",), **message),
        Task("backward 1", "compute", 10.0),
        Task("sum 1", "x", after=("backward 1",), **message),
    ]
    timeline = run_tasks(tasks, (4,), LINKS)
    message_s = 6 * HOP + 1.5 * SIZE / RATE  # a start for each hop, and 2 (n - 1) / n of the bytes
    begins = 10.0 + message_s  # the link was taken
    start, end = timeline["sum 1"]
    assert start == pytest.approx(np.full(4, begins))
    assert end == pytest.approx(np.full(4, begins + message_s))


def test_a_slow_device_delays_everybody_by_what_it_is_late():
    message = {"collective": "all_reduce", "message_bytes": SIZE}
    tasks = [
        Task("forward", "compute", 10.0),
        Task("sum", "x", after=("forward",), **message),
    ]
    slowness = np.ones(16)
    _, even = run_tasks(tasks, (16,), LINKS)["sum"]
    slowness[5] = 1.5
    _, uneven = run_tasks(tasks, (16,), LINKS, slowness=slowness)["sum"]
    assert uneven.max() == pytest.approx(even.max() + 5.0)
