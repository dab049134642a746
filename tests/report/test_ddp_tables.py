"""Labels of the rows of data-parallel training, those of one run, and the fit of a collective."""

import pandas as pd
import pytest

from cs336_systems.report.ddp_tables import fit_collective, of_run, with_model, with_wrapper


def test_rows_of_one_run_are_labelled_and_those_without_buckets_stay():
    same = {"model_size": "xl", "edition": 2025, "world_size": 2}
    names = [("naive", None), ("torch", 25.0), ("bucketed", 1.0)]
    rows = pd.DataFrame([same | {"implementation": name, "bucket_size_mb": size} for name, size in names])
    found = of_run(with_model(rows), world_size=2, bucket_size_mb=[25.0])
    assert found["wrapper"].tolist() == ["naive", "PyTorch's DDP"]
    assert set(found["model"]) == {"xl (2025)"}
    assert of_run(rows, world_size=4).empty
    assert with_wrapper(rows)["wrapper"].tolist() == ["naive", "PyTorch's DDP", "bucketed"]


def test_the_fit_takes_the_rows_asked_for():
    same = {"collective": "all_reduce", "world_size": 2, "backend": "nccl", "status": "ok"}
    rows = [same | {"message_mb": 10, "p50_ms": 2.0}, same | {"message_mb": 1, "p50_ms": 1.1}]
    for other in ({"backend": "gloo"}, {"world_size": 4}, {"collective": "broadcast"}):
        rows += [same | {"message_mb": 3, "p50_ms": 7.0} | other]
    fit = fit_collective(pd.DataFrame([*rows, same | {"message_mb": 5, "p50_ms": None, "status": "error"}]))
    assert (fit.latency_s, fit.seconds_per_byte) == pytest.approx((1e-3, 1e-4 / 2**20))
