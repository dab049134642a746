"""Bytes of ring all-reduces between processes."""

import pytest

from cs336_systems.bench import RINGS, count_ring_bytes

ELEMENTS = 13


def uneven(mine, rank, n):
    """Messages of different sizes, and no sum at the end unless a rank is alone."""
    for _ in range(n - 1):
        arrived = yield mine[: rank + 1]
        assert arrived.numel() == (rank - 1) % n + 1
    return mine


def test_every_byte_of_every_rank_is_counted():
    rows = count_ring_bytes([1, 2, 4], elements=ELEMENTS, rings={**RINGS, "uneven": uneven})
    assert len(rows) == 3 * (1 + 2 + 4)
    for row in rows:
        n, ring = row["world_size"], row["ring"]
        assert row["messages"] == (n - 1) * (2 if ring == "parts" else 1)
        assert row["right"] == (ring != "uneven" or n == 1)
        if ring != "parts":  # 13 elements have no equal parts
            each = ELEMENTS if ring == "whole tensors" else row["rank"] + 1
            assert row["sent_bytes"] == 4 * (n - 1) * each
    for n in (1, 2, 4):
        parts = [row["sent_bytes"] for row in rows if (row["ring"], row["world_size"]) == ("parts", n)]
        assert sum(parts) == 4 * ELEMENTS * 2 * (n - 1)


def test_a_world_size_that_there_is_not():
    with pytest.raises(ValueError, match="world size is 0; allowed: a whole number, 1 or more"):
        count_ring_bytes([0], elements=4)
    with pytest.raises(ValueError, match="world_sizes is empty; allowed: one or more"):
        count_ring_bytes([], elements=4)
