"""Benchmarks of the weighted sum: rows that can be saved and names that are checked."""

import pytest

from labbook import load_rows, save_rows

pytest.importorskip("triton")
from cs336_systems.bench.weighted_sum_bench import sweep_weighted_sum


def test_rows_of_every_pass_and_size():
    names = ["eager", "matmul", "triton", "triton_descriptor"]
    for rows in sweep_weighted_sum(num_rows=[8, 16], d_model=64, implementations=names):
        save_rows(rows, "weighted_sum", "weighted_sum_times", machine="test")
    frame = load_rows("weighted_sum", "test", "weighted_sum_times")
    assert len(frame) == 16
    skipped = frame[frame["status"] == "skipped"]
    assert set(skipped["implementation"]) == {"triton_descriptor"}
    assert set(skipped["pass"]) == {"backward"}
    assert (frame.loc[frame["status"] == "ok", "p50_ms"] > 0).all()


@pytest.mark.parametrize("wrong", [{"implementations": ["numpy"]}, {"passes": ["train_step"]}], ids=str)
def test_unknown_names(wrong):
    ((value,),) = wrong.values()
    with pytest.raises(ValueError, match=value):
        next(sweep_weighted_sum(num_rows=[8], d_model=8, **wrong))
