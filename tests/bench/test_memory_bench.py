"""Memory and checkpointing as rows, at tiny scale on this machine."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from cs336_systems import accounting
from cs336_systems.bench import memory_bench as module
from cs336_systems.bench.checkpointing_bench import block_bytes, checkpointing_rows
from cs336_systems.bench.memory_bench import PARTS, block_rows, explained_peaks, memory_rows
from cs336_systems.configs import model_size
from cs336_systems.measure.allocations import CATEGORIES, MIB, timeline_of_rows
from cs336_systems.measure.rows import load_rows, save_rows
from cs336_systems.measure.timing import release_memory
from cs336_systems.training import checkpointing

CONFIG = model_size("tiny")
RUN = {"context_length": 32, "batch_size": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    stem = tmp_path_factory.mktemp("memory") / "step"
    return memory_rows(CONFIG, **RUN, pass_="train_step", stem=stem)


def test_every_table_can_be_saved(tables):
    for table, rows in tables.items():
        path = save_rows(rows, "memory_profiling", table=table)
        assert len(load_rows("memory_profiling", path.parent.parent.name, table=table)) == len(rows)


def test_peaks_add_up_to_the_peak(tables):
    peaks = pd.DataFrame(tables["peaks"])
    totals = peaks.groupby("range").size_mib.sum()
    assert set(totals.index) == {"forward", "backward", "optimizer"}
    assert totals.max() == pytest.approx(peaks.peak_memory_mib.iloc[0])
    assert (
        timeline_of_rows(pd.DataFrame(tables["timeline"]))[list(CATEGORIES)].sum(axis=1).max() == totals.max()
    )
    at_rest = peaks[(peaks.range == "optimizer") & (peaks.category == "optimizer state")].size_mib.item()
    assert at_rest == accounting.optimizer_bytes(CONFIG) / MIB, "the recorded step is not the first"


def test_a_peak_is_explained(tables):
    oom = [tables["peaks"][0] | {"context_length": 64, "status": "oom", "size_mib": None}]
    peaks = pd.DataFrame(tables["peaks"] + oom)
    peaks["status"] = peaks["status"].fillna("ok")
    peaks.loc[peaks["category"] == "other", "size_mib"] += 64  # a workspace
    peaks["requested_memory_mib"] += 64
    peaks["peak_memory_mib"] += 64.5
    line, failed = explained_peaks(peaks).to_dict("records")
    assert (line["range"], line["context_length"], failed["status"]) == ("backward", 32, "oom")
    assert line["closed_form_mib"] * MIB == accounting.peak_bytes(CONFIG, 2, 32, "train_step")
    assert line["rounding_mib"] == pytest.approx(0.5)
    assert line["other_mib"] == pytest.approx(64, abs=0.1)
    assert abs(line["rest_mib"]) < 0.02 * line["closed_form_mib"]
    assert sum(line[part] for part in PARTS) == pytest.approx(line["peak_memory_mib"])


def test_largest_allocations_are_numbered(tables):
    largest = pd.DataFrame(tables["largest"])
    assert largest.step.tolist() == list(range(10))
    assert largest.size_mib.is_monotonic_decreasing


def test_out_of_memory_and_too_large_are_statuses(monkeypatch, tmp_path):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(module, "build_model", fail)
        tables = memory_rows(CONFIG, **RUN, pass_="forward", stem=tmp_path / "m")
    assert [row["status"] for row in tables["peaks"]] == ["oom"]
    large = memory_rows(model_size("10B", 2026), **RUN, pass_="train_step", stem=tmp_path / "m")
    assert [row["status"] for row in large["peaks"]] == ["skipped"]
    save_rows(tables["peaks"] + large["peaks"], "memory_profiling", table="failed")


def test_a_block_saves_and_gets_gradients():
    rows = pd.DataFrame(block_rows(CONFIG, **RUN))
    saved, gradients = rows[rows.case == "saved"], rows[rows.case == "gradient"]
    inside, boundary = block_bytes(CONFIG, **RUN)
    assert saved.size_mib.sum() * MIB == pytest.approx(inside + boundary)
    assert boundary == 2 * 32 * CONFIG.d_model * 4
    deeper = accounting.parameter_count(replace(CONFIG, num_layers=CONFIG.num_layers + 1))
    assert gradients.size_mib.sum() * MIB == 4 * (deeper - accounting.parameter_count(CONFIG))
    save_rows(rows, "memory_profiling", table="block")


def test_checkpointing_trades_memory_for_reruns():
    names = ["none", "every 1", "half blocks"]
    strategies = {name: checkpointing.strategy(name) for name in names}
    rows = list(checkpointing_rows(CONFIG, strategies, **RUN, steps=1))
    save_rows(rows, "gradient_checkpointing")
    plain, checkpointed, _ = rows
    assert (plain["calls"], checkpointed["calls"]) == (0, CONFIG.num_layers)
    for row in rows[:2]:
        plan = strategies[row["case"]](range(CONFIG.num_layers))
        peak = accounting.peak_bytes(CONFIG, 2, 32, "forward_backward", plan=plan) / MIB
        assert row["peak_memory_mib"] == pytest.approx(peak, rel=0.02), row["case"]
    assert checkpointed["p50_ms"] > 0
    assert rows[2]["calls"] == CONFIG.num_layers, "two halves are one block"
    assert "saved_for_backward_mib" not in rows[2]


@pytest.mark.gpu
def test_checkpointed_peak_on_a_gpu_is_as_predicted():
    names = ["none", "every 1", "every 2", "recursive"]
    strategies = {name: checkpointing.strategy(name) for name in names}
    config, run = model_size("medium"), {"context_length": 512, "batch_size": 4}
    release_memory("cuda")  # workspaces of other tests' threads
    for row in checkpointing_rows(config, strategies, **run, device="cuda", steps=1):
        plan = strategies[row["case"]](range(config.num_layers))
        expected = accounting.peak_bytes(config, 4, 512, "forward_backward", plan=plan) / MIB
        # Beyond the tensors: a workspace of cuBLAS for each of two threads, 32 MiB on Hopper.
        assert expected <= row["requested_memory_mib"] <= 1.002 * expected + 64, row["case"]
