"""Resources of the shipped tiles as rows."""

import pytest

from cs336_systems.measure.rows import load_rows, save_rows

pytest.importorskip("triton")
from cs336_systems.measure.tile_resources import as_in_the_table, tile_rows


def test_a_row_of_a_tile():
    save_rows(
        tile_rows([80], kernels=["forward"], dtypes=["bfloat16"], d_heads=[64]), "flash", machine="test"
    )
    row = load_rows("flash", "test").iloc[0]
    assert 32 < row["registers"] <= 255
    assert row["spilled_bytes"] == 0
    assert 0 < row["shared_bytes"] <= row["shared_limit_bytes"]
    assert as_in_the_table(row)
    assert not as_in_the_table({**row, "block_m": 2 * row["block_m"]})


def test_hoppers_own_kernel_comes_with_the_common_one():
    rows = tile_rows([90], kernels=["dkdv"], dtypes=["bfloat16"], d_heads=[64])
    assert [row["kernel"] for row in rows] == ["dkdv", "hopper_dkdv"]
    assert all(map(as_in_the_table, rows))
    assert not as_in_the_table(rows[1] | {"capability": 80})


def test_unknown_names():
    with pytest.raises(ValueError, match="kernel 'sideways' is unknown; allowed: forward, dq, dkdv"):
        tile_rows([80], kernels=["sideways"])
    with pytest.raises(ValueError, match="dtype 'float16' is unknown"):
        tile_rows([80], dtypes=["float16"])
