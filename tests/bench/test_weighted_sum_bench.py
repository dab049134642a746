"""Benchmarks of the weighted sum: rows that can be saved, names that are checked, and equal results."""

import pytest
import torch

from cs336_systems.measure import load_rows, save_rows
from cs336_systems.names import WEIGHTED_SUMS

pytest.importorskip("triton")
from cs336_systems.bench.weighted_sum_bench import FUNCTIONS, sweep_weighted_sum


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


def test_all_compute_the_same():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight = torch.randn(9, 64, device=device), torch.randn(64, device=device)
    for name in WEIGHTED_SUMS:
        torch.testing.assert_close(FUNCTIONS[name](x, weight), x @ weight, rtol=1e-4, atol=1e-4)
