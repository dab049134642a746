"""Resources of the shipped tiles as rows."""

import pytest

from cs336_systems.attention.config import KERNELS, tiles_for
from cs336_systems.measure.rows import load_rows, save_rows

pytest.importorskip("triton")
from cs336_systems.bench import kernel_resources as tile_resources
from cs336_systems.bench.kernel_resources import shipped_tiles, tile_rows


def test_a_row_of_a_tile():
    save_rows(
        tile_rows([80], kernels=["forward"], dtypes=["bfloat16"], d_heads=[64]), "flash", machine="test"
    )
    row = load_rows("flash", "test").iloc[0]
    assert 32 < row["registers"] <= 255
    assert row["spilled_bytes"] == 0
    assert 0 < row["shared_bytes"] <= row["shared_limit_bytes"]


def test_hoppers_own_kernels_come_with_the_common_ones():
    rows = tile_rows([90], kernels=["forward", "dkdv"], dtypes=["bfloat16"], d_heads=[64])
    assert [row["kernel"] for row in rows] == ["forward", "dkdv", "hopper_forward", "hopper_backward"]


def test_the_committed_table_is_of_the_tuning_table(monkeypatch, tmp_path):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    table = shipped_tiles()
    assert set(table["capability"]) == set(tile_resources.CAPABILITIES)
    places = [(kernel, d) for kernel in KERNELS for d in (16, 32, 64, 128, 256)]
    several = sum(len(tiles_for(kernel, "exact", d, (9, 0))) for kernel, d in places)
    assert len(table) == several + 3 * 3 * (3 * 3 - 1) + sum(map(len, tile_resources.BY_HAND.values()))


def test_a_table_that_lacks_one_of_several_tiles_is_refused(monkeypatch, tmp_path):
    table = shipped_tiles()
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    place = "capability == 90 and d_head == 64 and dtype == 'float32' and kernel == 'forward'"
    save_rows(table.query(place).iloc[1:], **tile_resources.PLACE)
    with pytest.raises(ValueError, match=r"older than the tuning table \(forward\)"):
        shipped_tiles()


@pytest.mark.parametrize(
    "change", [{"block_m": 8}, {"num_stages": 9}, {"kernel": "hopper_backward"}, {"kernel": "older"}]
)
def test_a_table_that_is_older_is_refused(change, monkeypatch, tmp_path):
    table = shipped_tiles()
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    first = table[table["capability"] == 80].iloc[:1].assign(**change)
    first = first.drop(columns=["torch", "triton", "measured_at", "commit"])
    save_rows(first, **tile_resources.PLACE)
    with pytest.raises(ValueError, match=r"older than the tuning table .*; write it again: python -m cs336"):
        shipped_tiles()


def test_unknown_names():
    with pytest.raises(ValueError, match="kernel 'sideways' is unknown; allowed: forward, dq, dkdv"):
        tile_rows([80], kernels=["sideways"])
    with pytest.raises(ValueError, match="dtype 'float16' is unknown"):
        tile_rows([80], dtypes=["float16"])
