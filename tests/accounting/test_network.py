"""The simulator of devices and links: closed forms, what waits for what, and its cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.accounting.network import SIMULATED, Links, Task, collective_finish, run_tasks

DEVICES, BYTES, HOPS, RATES = (
    st.integers(1, 40),
    st.floats(0, 1e9),
    st.floats(0, 1),
    st.floats(1e3, 1e9),
)
SIZE, LINKS = 840.0, Links(4.0, 0.5)


def ring_seconds(collective, size, n, hop_s, bytes_per_s):
    """A latency for every hop, and every part of the tensor over n - 1 links; twice in an all-reduce."""
    hop = hop_s + size / n / bytes_per_s
    return (n - 1) * hop * (2 if collective == "all_reduce" else 1)


def last(collective, size, mesh, links, **how):
    return collective_finish(collective, size, mesh, links, **how).max()


@given(st.sampled_from(SIMULATED), DEVICES, BYTES, HOPS, RATES)
def test_equal_links_give_the_closed_form_of_a_ring(collective, n, size, hop, rate):
    finish = collective_finish(collective, size, (n,), Links(rate, hop))
    assert finish == pytest.approx(ring_seconds(collective, size, n, hop, rate))


def test_lines_of_a_mesh_run_by_themselves():
    ready = np.zeros((4, 3))
    ready[:, 1] = 700.0  # late, so that along rows all wait for it
    finish = collective_finish("all_gather", SIZE, (4, 3), (LINKS, LINKS), axis=0, ready=ready)
    alone = ring_seconds("all_gather", SIZE, 4, 0.5, 4.0)
    assert finish - ready == pytest.approx(np.full((4, 3), alone))
    along_rows = collective_finish("all_gather", SIZE, (4, 3), (LINKS, LINKS), axis=1, ready=ready)
    row = collective_finish("all_gather", SIZE, (3,), LINKS, ready=ready[0])
    assert along_rows.tolist() == 4 * [row.tolist()]


def test_one_slow_link_sets_the_pace_of_its_own_ring_alone():
    """As if all of that ring were slow; and so much does it matter as bytes matter beside latency."""
    rates = np.full((4, 3), 4.0)
    rates[2, 1] = 1.0
    for hop in (0.0, 0.5, 1e4):
        finish = collective_finish("all_reduce", SIZE, (4, 3), (Links(rates, hop), LINKS), axis=0)
        slow, fast = (ring_seconds("all_reduce", SIZE, 4, hop, w) for w in (1.0, 4.0))
        assert finish.max(axis=0) == pytest.approx([fast, slow, fast])


@given(DEVICES.filter(lambda n: n > 1), st.floats(0, 1e3))
def test_nobody_has_the_sum_before_the_last_has_come(n, late):
    ready = np.zeros(n)
    ready[n // 2] = late
    finish = collective_finish("all_reduce", SIZE, (n,), LINKS, ready=ready)
    assert finish.min() >= late
    assert finish.max() <= late + last("all_reduce", SIZE, (n,), LINKS) * (1 + 1e-12)


def test_tasks_wait_for_their_lane_and_for_each_other():
    tasks = [
        Task("backward 2", "compute", 10.0),
        Task("sum 2", "x", collective="all_reduce", message_bytes=SIZE, after=("backward 2",)),
        Task("backward 1", "compute", 10.0),
        Task("sum 1", "x", collective="all_reduce", message_bytes=SIZE, after=("backward 1",)),
    ]
    timeline = run_tasks(tasks, (4,), LINKS)
    seconds = ring_seconds("all_reduce", SIZE, 4, 0.5, 4.0)
    message_s = 6 * 0.5 + SIZE / (4.0 / 1.5)  # a start for each hop, and 2 (n - 1) / n of the bytes
    left = max(20.0, 10.0 + message_s) + message_s - 20.0
    assert timeline["sum 1"][1] == pytest.approx(np.full(4, 20 + left))
    assert timeline["sum 1"][0] == pytest.approx(10 + seconds)  # the link was taken


def test_a_slow_device_delays_everybody_by_what_it_is_late():
    tasks = [
        Task("forward", "compute", 10.0),
        Task("sum", "x", collective="all_reduce", message_bytes=SIZE, after=("forward",)),
    ]
    slowness = np.ones(16)
    slowness[5] = 1.5
    even, uneven = (
        run_tasks(tasks, (16,), LINKS, slowness=s)["sum"][1].max() for s in (1.0, slowness)
    )
    assert uneven == pytest.approx(even + 5.0)
