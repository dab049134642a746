"""The tile study times one kernel with any tile, and says so when a tile is wrong or too large."""

import pytest

from cs336_systems.attention.config import KERNELS, Tile
from cs336_systems.measure import load_rows, save_rows

pytest.importorskip("triton")
from cs336_systems.bench import tile_bench as tiles

TINY = {"num_heads": 1, "context_length": 64, "d_head": 16, "dtype": "float16", "steps": 1}


def test_every_kernel_with_a_tile_of_ones_own():
    rows = [row for batch in tiles.sweep_tiles(tiles=[Tile(32, 64, 4, 1)], **TINY) for row in batch]
    assert [row["kernel"] for row in rows] == [kernel for kernel in KERNELS for _ in range(2)]
    assert [row["status"] for row in rows] == ["ok"] * 6
    assert rows[1]["block_m"] == 32, "after the shipped one"
    save_rows(rows, "flash_benchmarking", "tile_times", machine="test")
    assert len(load_rows("flash_benchmarking", "test", "tile_times")) == 6


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_result_is_an_error(kernel, monkeypatch):
    prepare = tiles._prepare
    monkeypatch.setattr(tiles, "_prepare", lambda *arguments: (lambda: None, *prepare(*arguments)[1:]))
    row = tiles.benchmark_tile(kernel, Tile(16, 64, 4, 1), **TINY)
    assert row["status"] == "error"
    assert "off by nan" in row["reason"]


def test_what_does_not_launch_is_an_error(monkeypatch):
    def too_large(*arguments):
        raise RuntimeError("out of resource: shared memory, Required: 247808, Hardware limit: 232448")

    monkeypatch.setattr(tiles, "_prepare", too_large)
    row = tiles.benchmark_tile("forward", Tile(64, 64, 4, 1), **TINY)
    assert row["status"] == "error"
    assert "Hardware limit" in row["reason"]
