"""Memory as rows, at tiny scale on this machine."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from cs336_systems import accounting
from cs336_systems.bench import memory_bench
from cs336_systems.bench.memory_bench import block_rows, memory_rows
from cs336_systems.configs import model_size
from cs336_systems.measure.allocations import CATEGORIES, MIB, timeline_of_rows
from labbook.rows import load_rows, save_rows

CONFIG = model_size("tiny")
RUN = {"context_length": 32, "batch_size": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    stem = tmp_path_factory.mktemp("memory") / "step"
    return memory_rows(CONFIG, **RUN, pass_="train_step", stem=stem)


def test_every_table_can_be_saved(tables):
    for table, rows in tables.items():
        path = save_rows(rows, "memory_profiling", table)
        assert len(load_rows("memory_profiling", path.parent.parent.name, table)) == len(rows)


def test_peaks_add_up_to_the_peak(tables):
    peaks = pd.DataFrame(tables["memory_peaks"])
    totals = peaks.groupby("stage").size_mib.sum()
    assert set(totals.index) == {"forward", "backward", "optimizer"}
    assert totals.max() == pytest.approx(peaks.peak_memory_mib.iloc[0])
    drawn = timeline_of_rows(pd.DataFrame(tables["memory_timeline"]))[list(CATEGORIES)]
    assert drawn.sum(axis=1).max() == totals.max()
    at_rest = peaks[(peaks.stage == "backward") & (peaks.category == "optimizer state")].size_mib.item()
    assert at_rest == accounting.optimizer_bytes(CONFIG) / MIB, "the recorded step is not the first"


def test_out_of_memory_and_too_large_are_statuses(monkeypatch, tmp_path):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    large = memory_rows(model_size("10B", 2026), **RUN, pass_="train_step", stem=tmp_path / "m")
    monkeypatch.setattr(memory_bench, "build_model", fail)
    failed = memory_rows(CONFIG, **RUN, pass_="forward", stem=tmp_path / "m")
    for tables, status in ((large, "skipped"), (failed, "oom")):
        assert [row["status"] for row in tables["memory_peaks"]] == [status]
        save_rows(tables["memory_peaks"], "memory_profiling", "memory_peaks")


def test_a_block_saves_and_gets_gradients():
    rows = pd.DataFrame(block_rows(CONFIG, **RUN))
    saved, gradients = rows[rows.kind == "saved"], rows[rows.kind == "gradient"]
    closed_form = sum(accounting.block_activation_breakdown(CONFIG, 2, 32).values())
    assert saved.size_mib.sum() * MIB == pytest.approx(closed_form)
    deeper = accounting.parameter_count(replace(CONFIG, num_layers=CONFIG.num_layers + 1))
    assert gradients.size_mib.sum() * MIB == 4 * (deeper - accounting.parameter_count(CONFIG))
    save_rows(rows.to_dict("records"), "memory_profiling", "block_tensors")
