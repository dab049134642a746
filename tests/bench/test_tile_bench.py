"""The tile study times one kernel with any tile, and says so when a tile is wrong or too large."""

import pytest

from cs336_systems.attention.config import Tile
from labbook import load_rows, save_rows

pytest.importorskip("triton")
from cs336_systems.bench import tile_bench

TINY = {"num_heads": 1, "context_length": 64, "d_head": 16, "dtype": "float16", "steps": 1}


def sweep(tile: Tile) -> list[dict]:
    return [row for (row,) in tile_bench.sweep_tiles([tile], **TINY)]


def test_every_kernel_with_a_tile_of_ones_own():
    rows = sweep(Tile(32, 64, 4, 1))
    assert [row["kernel"] for row in rows] == [kernel for kernel in tile_bench.STUDIED for _ in range(2)]
    assert [row["status"] for row in rows] == ["ok"] * 6
    assert rows[1]["block_m"] == 32, "after the shipped one"
    save_rows(rows, "flash_benchmarking", "tile_times", machine="test")
    assert len(load_rows("flash_benchmarking", "test", "tile_times")) == 6


def test_what_computes_nothing_or_does_not_launch_is_an_error(monkeypatch):
    prepare = tile_bench._prepare

    def broken(kernel, *arguments):
        if kernel == "forward":
            raise RuntimeError("out of resource: shared memory, Required: 247808, Hardware limit: 232448")
        return lambda: None, *prepare(kernel, *arguments)[1:]

    monkeypatch.setattr(tile_bench, "_prepare", broken)
    rows = sweep(Tile(16, 64, 4, 1))
    assert {row["status"] for row in rows} == {"error"}
    for row in rows:
        assert ("Hardware limit" if row["kernel"] == "forward" else "off by nan") in row["reason"]
