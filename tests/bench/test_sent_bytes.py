"""The bytes that rings and sharded layers really send, against the closed forms."""

from collections import Counter

import pytest
from torch.distributed.fsdp import fully_shard

from cs336_systems.bench import count_ring_bytes, count_sent_bytes
from cs336_systems.parallel import TensorParallelSwiGLU

ELEMENTS = 13


def test_every_byte_of_every_rank_of_a_ring_is_counted():
    rows = count_ring_bytes([1, 2, 4], elements=ELEMENTS)
    assert len(rows) == 2 * (1 + 2 + 4)
    for row in rows:
        assert row["right"]
        n, whole = row["world_size"], row["ring"] == "whole tensors"
        assert row["messages"] == (n - 1) * (1 if whole else 2)
        if whole:  # 13 elements have no equal parts
            assert row["sent_bytes"] == 4 * (n - 1) * ELEMENTS
    for n in (1, 2, 4):
        parts = [row["sent_bytes"] for row in rows if (row["ring"], row["world_size"]) == ("parts", n)]
        assert sum(parts) == 4 * ELEMENTS * 2 * (n - 1)


SIZES = {"d_model": 8, "d_ff": 24, "tokens": 12}
MESHES = [(1, 2), (1, 4), (4, 1), (2, 2)]  # of one launch


def sharded_layer(full, mesh):
    layer = TensorParallelSwiGLU(full, mesh.get_group("y")) if mesh.size(1) > 1 else full
    return fully_shard(layer, mesh=mesh["x"], reshard_after_forward=True) if mesh.size(0) > 1 else layer


def test_every_rank_of_a_sharded_layer_sends_the_bytes_of_the_closed_form():
    """Around rings: 3 D F / Y weights gathered and scattered along X, B D / X activations summed along Y."""
    rows = count_sent_bytes({"sharded": sharded_layer}, MESHES, **SIZES)
    assert max(row["error"] for row in rows) < 0.02  # bfloat16 has 8 bits
    d_model, d_ff, tokens = SIZES.values()
    for x, y in MESHES:
        weights = 2 * 3 * d_model * d_ff // y * (x - 1) // x
        sums = {"all_reduce": 2 * 2 * tokens // x * d_model * (y - 1) // y}
        for pass_, scatters in (("forward", {}), ("backward", {"reduce_scatter": weights})):
            sends = {"all_gather": weights, **scatters, **sums}
            expected = Counter({(name, sent): 1 for name, sent in sends.items() if sent})
            for rank in range(x * y):
                mine = [
                    row
                    for row in rows
                    if (row["X"], row["Y"], row["rank"], row["pass"]) == (x, y, rank, pass_)
                ]
                assert Counter((row["collective"], row["sent_bytes"]) for row in mine) == expected, (
                    x,
                    y,
                    rank,
                )


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (lambda: count_ring_bytes([0], elements=4), r"world_sizes is \[0\]; allowed: whole numbers"),
        (lambda: count_ring_bytes([], elements=4), r"world_sizes is \[\]"),
        (lambda: count_sent_bytes({}, [], **SIZES), r"meshes is \[\]"),
        (lambda: count_sent_bytes({}, [(0, 2)], **SIZES), r"meshes is \[\(0, 2\)\]; allowed: pairs of whole"),
        (lambda: count_sent_bytes({}, [(5, 1)], **SIZES), "tokens is 12; allowed: a multiple of 5"),
    ],
)
def test_what_cannot_be_counted_is_refused(count, words):
    with pytest.raises(ValueError, match=words):
        count()
