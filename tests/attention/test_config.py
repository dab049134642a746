"""Which tile of the tuning table a kernel runs with, told without a GPU."""

import dataclasses

import pytest
import torch

from cs336_systems.attention.config import HOPPER_EXACT, INTERPRETER, KERNELS, Tile, tiles_for
from cs336_systems.checks.attention_checks import AttentionCase, check_attention

pytest.importorskip("triton")
from cs336_systems.attention import FlashAttentionTriton, flash_triton
from cs336_systems.attention import launch_plans as plans

LARGE, MIDDLE, SMALL = TILES = Tile(64, 128, 4, 2), Tile(32, 64, 8, 2), Tile(16, 32, 4, 1)
QUERIES, KEYS = ((2, 3, 512, 64), (98_304, 32_768, 64, 1)), ((2, 3, 256, 64), (49_152, 16_384, 64, 1))
DEVICE = torch.device("cpu" if flash_triton.INTERPRETED else "cuda")
WAY = plans.way_for(torch.float32, 64, DEVICE)


@pytest.mark.parametrize(
    ("processors", "by_queries", "by_keys"),
    [
        (12, LARGE, LARGE),  # 6 heads of 8 tiles of queries, 2 tiles of keys
        (13, LARGE, MIDDLE),
        (48, LARGE, SMALL),
        (49, MIDDLE, SMALL),
        (97, SMALL, SMALL),
        (1000, SMALL, SMALL),
    ],
)
def test_the_largest_tile_that_occupies_all_processors(processors, by_queries, by_keys):
    way = dataclasses.replace(WAY, tiles=(TILES,) * 3, processors=processors)
    problem = plans.Problem(QUERIES, KEYS, way, is_causal=True)
    assert [problem.tile(kernel) for kernel in KERNELS] == [by_queries, by_queries, by_keys]


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_go_from_large_to_small(kernel):
    side = "block_n" if kernel == "dkdv" else "block_m"
    for tiles in HOPPER_EXACT[kernel, "exact"].values():
        rows = [getattr(tile, side) for tile in tiles]
        assert rows == sorted(set(rows), reverse=True), "else a later one never runs"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_the_kernels_of_one_head_size_round_scores_alike(d, capability):
    """The backward makes the forward's scores again, and L has to fit them."""
    tiles = [tile for kernel in KERNELS for tile in tiles_for(kernel, "exact", d, capability)]
    assert len({tile.chunk % d for tile in tiles}) == 1  # whole heads are one chunk


def test_only_exact_float32_on_hopper_has_a_choice():
    for capability in (INTERPRETER, (8, 0), (9, 0), (10, 0)):
        for kind in ("half", "tf32", "exact"):
            tiles = [tiles_for(kernel, kind, 128, capability) for kernel in KERNELS]
            assert any(len(some) > 1 for some in tiles) == ((capability, kind) == ((9, 0), "exact"))


def test_a_tile_brings_its_chunk():
    problem = plans.Problem(QUERIES, KEYS, WAY, is_causal=True)
    assert [problem.constants(tile)["CHUNK"] for tile in (LARGE, Tile(64, 64, 4, 1, chunk=32))] == [0, 32]


def test_what_a_tile_says_in_words():
    assert Tile(64, 64, 4, 1).case is None
    assert Tile(64, 64, 4, 1, 168).case == "at most 168 registers"
    assert Tile(64, 64, 4, 1, 168, chunk=32).case == "at most 168 registers, chunks of 32"


@pytest.mark.parametrize("d", [24, 64])
def test_scores_in_chunks_are_the_same(d, monkeypatch):
    monkeypatch.setattr(plans, "uses_descriptors", lambda *_: False)
    monkeypatch.setattr(plans, "tiles_for", lambda *_: (Tile(32, 64, 4, 1, chunk=16),))
    plans.way_for.cache_clear()
    cases = [
        AttentionCase("causal", (2, 2), 130, 130, d, is_causal=True),
        AttentionCase("full", (2,), 70, 100, d),
    ]
    try:
        check_attention(FlashAttentionTriton.apply, cases=cases, device=DEVICE)
    finally:
        plans.way_for.cache_clear()
