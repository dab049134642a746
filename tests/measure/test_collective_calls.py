"""Collectives are seen, and can be left out."""

import collective_workers

from cs336_systems.parallel import launch


def test_collectives_are_seen_and_can_be_left_out():
    (sent, left_out), _ = launch(collective_workers.sent_and_left_out, 2, backend="gloo")
    assert sent[0] == left_out[0] == [("all_reduce", 16, "float32"), ("all_gather", 32, "float32")]
    assert sent[1:] == ([1.0] * 4, [1.0] * 8)
    assert left_out[1:] == ([0.0] * 4, [-1.0] * 8)
