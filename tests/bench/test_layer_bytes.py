"""The bytes that sharded layers really send, against the closed forms, to the byte."""

from collections import Counter

import pytest
from torch.distributed.fsdp import fully_shard

from cs336_systems.accounting import scaling
from cs336_systems.bench.layer_bytes import count_sent_bytes
from cs336_systems.parallel import TensorParallelSwiGLU

SIZES = {"d_model": 8, "d_ff": 24, "tokens": 12}
# Of one launch: each mesh, its scheme, and the values of that scheme's symbols.
MESHES = {
    (1, 2): ("tp", {"N": 2}),
    (1, 4): ("tp", {"N": 4}),
    (4, 1): ("fsdp", {"N": 4}),
    (2, 2): ("fsdp_tp", {"X": 2, "Y": 2}),
}


def sharded(full, mesh):
    layer = TensorParallelSwiGLU(full, mesh.get_group("y")) if mesh.size(1) > 1 else full
    return fully_shard(layer, mesh=mesh["x"], reshard_after_forward=True) if mesh.size(0) > 1 else layer


@pytest.fixture(scope="module")
def rows():
    return count_sent_bytes({"sharded": sharded}, list(MESHES), **SIZES)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_sends_the_bytes_of_the_closed_form(rows, mesh):
    scheme, devices = MESHES[mesh]
    values = {"B": SIZES["tokens"], "D": SIZES["d_model"], "F": SIZES["d_ff"]} | devices
    for pass_ in ("forward", "backward"):
        expected = Counter(
            (message.collective, scaling.evaluate(message.sent_bytes, values))
            for message in scaling.costs(scheme, pass_).messages
        )
        for rank in range(mesh[0] * mesh[1]):
            key = (*mesh, rank, pass_)
            mine = [row for row in rows if (row["X"], row["Y"], row["rank"], row["pass"]) == key]
            assert Counter((row["collective"], row["sent_bytes"]) for row in mine) == expected, key


def test_the_layers_compute_what_the_whole_layer_computes(rows):
    assert max(row["error"] for row in rows) < 0.02  # bfloat16 has 8 bits


@pytest.mark.parametrize(
    ("meshes", "words"),
    [
        ([], "meshes is empty; allowed: one or more"),
        ([(0, 2)], "mesh is 0 x 2; allowed: whole numbers"),
        ([(5, 1)], "tokens is 12; allowed: a multiple of 5"),
    ],
)
def test_meshes_that_cannot_be_are_refused(meshes, words):
    with pytest.raises(ValueError, match=words):
        count_sent_bytes({"sharded": sharded}, meshes, **SIZES)
