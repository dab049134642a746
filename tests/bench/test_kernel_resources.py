"""Resources of the shipped tiles as rows, and the committed rows beside the tiles of today."""

import pytest

from labbook import load_rows, save_rows

pytest.importorskip("triton")
from cs336_systems.attention.config import HOPPER_KERNELS, KERNELS
from cs336_systems.bench import kernel_resources
from cs336_systems.bench.kernel_resources import PLACE, shipped_tiles, sweep_resources


def test_rows_of_shipped_tiles():
    names = ["forward", "hopper_forward"]
    (rows,) = sweep_resources([90], kernels=names, dtypes=["bfloat16"], d_heads=[64])
    save_rows(rows, "flash_forward", "kernel_resources", machine="test")
    table = load_rows("flash_forward", "test", "kernel_resources")
    assert list(table["kernel"]) == ["forward"] + ["hopper_forward"] * 3
    assert table["registers"].between(33, 255).all()
    assert (table["shared_bytes"] <= table["shared_limit_bytes"]).all()


def test_the_committed_rows_are_of_todays_tiles(monkeypatch, tmp_path):
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path))
    table = shipped_tiles()
    assert set(table["capability"]) == set(kernel_resources.CAPABILITIES)
    assert set(table["kernel"]) == {*KERNELS, *HOPPER_KERNELS}


@pytest.mark.parametrize(
    "change", [{"block_m": 16}, {"num_stages": 9}, {"chunk": 32}, {"kernel": "hopper_backward"}, None]
)
def test_rows_of_other_tiles_are_refused(change, monkeypatch, tmp_path):
    place = "capability == 90 and d_head == 64 and dtype == 'float32' and kernel == 'forward'"
    rows = shipped_tiles().query(place)
    rows = rows.iloc[:1].assign(**change) if change else rows.iloc[1:]  # one of several tiles is missing
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path))
    save_rows(rows.astype({"chunk": "Int64", "max_registers": "Int64"}), **PLACE)
    with pytest.raises(ValueError, match="older"):
        shipped_tiles()


@pytest.mark.parametrize(("name", "value"), [("kernels", "sideways"), ("dtypes", "float16")])
def test_unknown_names(name, value):
    with pytest.raises(ValueError, match=value):
        next(sweep_resources([80], **{name: [value]}))
    with pytest.raises(ValueError, match="capability 70"):
        next(sweep_resources([70]))
