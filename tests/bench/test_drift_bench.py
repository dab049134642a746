"""Data-parallel training beside one process: rows that say how far apart they are."""

import pandas as pd
import pytest

from cs336_systems.bench import training_drift
from labbook import save_rows


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu(2))])
def test_every_wrapper_follows_one_process(backend):
    names = ["naive", "flat", "overlapped", "bucketed", "torch"]
    batches = list(training_drift(2, backend=backend, implementations=names, steps=2))
    rows = pd.DataFrame([row for rows in batches for row in rows])
    save_rows(rows, "naive_ddp", "training_drift", machine="somewhere")
    assert len(batches) == len(names) * 2 * 2  # optimizers, steps
    assert len(rows) == 2 * len(batches)
    assert set(rows["backend"]) == {backend}
    assert set(rows["step_index"]) == {1, 2}
    assert (rows.query("compared == 'replicas'")["max_difference"] == 0).all()
    furthest = rows.query("compared == 'weights'").groupby("optimizer")["max_difference"].max()
    # AdamW turns the rounding of a gradient near zero into a difference of up to its rate.
    assert furthest["SGD"] < (1e-6 if backend == "gloo" else 1e-5)
    assert furthest["AdamW"] < 3e-3


@pytest.mark.parametrize(("name", "value"), [("optimizers", "Lion"), ("implementations", "fast")])
def test_it_refuses_before_anything_starts(name, value):
    with pytest.raises(ValueError, match=value):
        next(training_drift(2, backend="gloo", **{name: [value]}))
