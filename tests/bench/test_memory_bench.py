"""Memory and checkpointing as rows, at tiny scale on this machine."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from cs336_systems import accounting
from cs336_systems.bench import checkpointing_bench, memory_bench
from cs336_systems.bench.checkpointing_bench import block_bytes, sweep_checkpointing
from cs336_systems.bench.memory_bench import block_rows, memory_rows
from cs336_systems.configs import model_size
from cs336_systems.measure.allocations import CATEGORIES, MIB, timeline_of_rows
from cs336_systems.training.checkpointing import strategy
from labbook.rows import load_rows, save_rows
from labbook.timing import release_memory

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
    inside, boundary = block_bytes(CONFIG, **RUN)
    assert saved.size_mib.sum() * MIB == pytest.approx(inside + boundary)
    assert boundary == 2 * 32 * CONFIG.d_model * 4
    deeper = accounting.parameter_count(replace(CONFIG, num_layers=CONFIG.num_layers + 1))
    assert gradients.size_mib.sum() * MIB == 4 * (deeper - accounting.parameter_count(CONFIG))
    save_rows(rows.to_dict("records"), "memory_profiling", "block_tensors")


def test_checkpointing_trades_memory_for_reruns():
    names = ["none", "every 1", "half blocks"]
    rows = [row for rows in sweep_checkpointing(CONFIG, names, **RUN, steps=1) for row in rows]
    save_rows(rows, "gradient_checkpointing", "checkpointing_times")
    plain, checkpointed, halves = rows
    reruns = [row["recomputed_blocks"] for row in rows]
    assert reruns == [0, CONFIG.num_layers, CONFIG.num_layers], "two halves are one block"
    for row in (plain, checkpointed):
        plan = strategy(row["strategy"])(range(CONFIG.num_layers))
        peak = accounting.peak_bytes(CONFIG, 2, 32, "forward_backward", plan=plan) / MIB
        assert row["peak_memory_mib"] == pytest.approx(peak, rel=0.02), row["strategy"]
    assert checkpointed["saved_for_backward_mib"] < plain["saved_for_backward_mib"]
    assert "saved_for_backward_mib" not in halves
    assert checkpointed["p50_ms"] > 0


def test_attention_without_scores_and_selective_checkpointing():
    """What is kept decides the peak: all, all but scores, the results of linear layers, inputs alone."""
    run = {"context_length": 128, "batch_size": 2, "device": "cpu", "steps": 1}
    plain, selective, least = sweep_checkpointing(CONFIG, ["none", "selective", "every 1"], **run)
    (flash,) = sweep_checkpointing(CONFIG, ["none"], **run, attention_implementation="flash_pytorch")
    rows = [row for rows in (plain, flash, selective, least) for row in rows]
    save_rows(rows, "gradient_checkpointing", "checkpointing_times")
    peaks = [row["peak_memory_mib"] for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert [row["attention"] for row in rows] == ["plain", "flash_pytorch", "plain", "plain"]
    assert [row["recomputed_blocks"] for row in rows] == [0, 0, CONFIG.num_layers, CONFIG.num_layers]
    saved = [row.get("saved_for_backward_mib") for row in rows]
    assert saved[0] > saved[1] > saved[3]
    assert saved[2] is None


@pytest.mark.parametrize(
    ("lacking", "answer", "reason"),
    [
        ("cs336_systems.bench.checkpointing_bench.why_no_attention", "there is no triton", "triton"),
        ("labbook.machine.available_memory_bytes", 10**5, "GiB"),
    ],
)
def test_what_cannot_run_here_is_a_status_and_not_built(monkeypatch, lacking, answer, reason):
    monkeypatch.setattr(lacking, lambda *_: answer)
    monkeypatch.setattr(checkpointing_bench, "build_model", None)
    how = RUN | {"attention_implementation": "flash_pytorch"}
    (rows,) = sweep_checkpointing(CONFIG, ["none", "every 1"], **how)
    save_rows(rows, "gradient_checkpointing", "checkpointing_times")
    assert [(row["status"], reason in row["reason"]) for row in rows] == [("skipped", True)] * 2


@pytest.mark.gpu
def test_checkpointed_peak_on_a_gpu_is_as_predicted():
    names = ["none", "every 1", "every 2", "recursive"]
    config, run = model_size("medium"), {"context_length": 512, "batch_size": 4}
    release_memory("cuda")  # workspaces of other tests' threads
    for (row,) in sweep_checkpointing(config, names, **run, device="cuda", steps=1):
        plan = strategy(row["strategy"])(range(config.num_layers))
        expected = accounting.peak_bytes(config, 4, 512, "forward_backward", plan=plan) / MIB
        # Beyond the tensors: a workspace of cuBLAS for each of two threads, 32 MiB on Hopper.
        assert expected <= row["requested_memory_mib"] <= 1.002 * expected + 64, row["strategy"]
