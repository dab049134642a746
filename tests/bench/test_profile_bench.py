"""Profiling a model of the workbook, and the choice of the profiler."""

from pathlib import Path

import pytest
import torch

from cs336_systems.bench import profile_bench
from cs336_systems.bench.profile_bench import Target, choose_source, profile_model, profile_rows
from cs336_systems.measure import nsys
from cs336_systems.measure.profile import ProfileError, kernel_table, range_table, stages
from cs336_systems.measure.torch_trace import read_trace
from labbook.rows import load_rows, save_rows

SAMPLE = Path(__file__).parents[1] / "measure" / "data" / "sample.sqlite"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {"context_length": 16, "batch_size": 2, "device": "cpu", "warmup_steps": 1, "steps": 2}


def test_a_train_step_on_the_cpu(tmp_path):
    profile = profile_model(Target(**SMALL), tmp_path / "tiny")
    table = kernel_table(profile)
    assert (profile.source, table.attrs["steps"]) == ("torch cpu", 2)
    assert set(stages(table)) == {"forward", "backward", "optimizer"}
    assert set(table[stages(table) == "optimizer"]["class"]) == {"optimizer"}

    calls = table.groupby(["range", "kernel"]).calls.sum()
    layer = "measure/forward/layers.1"
    for module in ("attn/q_proj", "attn/output_proj", "ffn/w1", "ffn/w3", "ffn/w2"):
        assert calls[f"{layer}/{module}", "aten::mm"] == 1
    for part in ("scores", "values"):
        assert calls[f"{layer}/attn/attention/{part}", "aten::bmm"] == 1
    # Each of forward's 2 * 7 + 1 linear layers and 2 * 2 matmuls of attention has two matmuls in backward.
    matmuls = table[table.kernel.isin(["aten::mm", "aten::bmm"])]
    found = matmuls.groupby(stages(matmuls)).calls.sum().to_dict()
    assert found == {"forward": 15 + 4, "backward": 2 * (15 + 4)}

    assert kernel_table(read_trace(tmp_path / "tiny.json")).equals(table)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_other_passes(tmp_path, pass_):
    table = kernel_table(profile_model(Target(pass_=pass_, **SMALL), tmp_path / "p"))
    assert set(stages(table)) == {pass_}, "what a pass needs first is prepared outside the range"


def test_rows_can_be_saved_and_the_trace_of_a_step_kept(tmp_path):
    kept = tmp_path / "traces" / "tiny.json.gz"
    tables = profile_rows(Target(pass_="forward", **SMALL), keep=kept)
    for table, rows in tables.items():
        path = save_rows(rows, "nsys_profile", table)
        assert len(load_rows("nsys_profile", path.parent.parent.name, table)) == len(rows)
    assert {row["range"] for row in tables["ranges"]} == {"measure", "measure/forward"}
    of_kept = read_trace(kept)
    assert kernel_table(of_kept).attrs["steps"] == 1
    assert set(range_table(of_kept).range) == {"measure", "measure/forward"}


def test_a_step_that_nsys_saw_is_kept_as_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_bench, "choose_source", lambda device, source: source)
    monkeypatch.setattr(profile_bench, "profile_model", lambda *_: nsys.read_export(SAMPLE))
    tables = profile_rows(Target(), "nsys", keep=tmp_path / "step.json.gz")
    assert [*tables] == ["kernels", "ranges", "nsys_timeline"]
    save_rows(tables["nsys_timeline"], "nsys_profile", "nsys_timeline")
    assert {row["profiler"] for row in tables["nsys_timeline"]} == {"nsys"}
    assert [*profile_rows(Target(), "nsys")] == ["kernels", "ranges"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"), "oom"),
        (ProfileError("nsys made no report of 'train'"), "error"),
    ],
)
def test_what_fails_is_a_status(monkeypatch, error, status):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(profile_bench, "profile_model", fail)
    for table, rows in profile_rows(Target(**SMALL)).items():
        assert [(row["status"], row["profiler"]) for row in rows] == [(status, "torch cpu")]
        save_rows(rows, "nsys_profile", table)


def test_what_does_not_fit_is_not_tried():
    target = Target(model_size="10B", edition=2026, context_length=65_536, device="cpu")
    assert [row["status"] for row in profile_rows(target)["ranges"]] == ["skipped"]


def test_the_best_source_that_is_there(monkeypatch):
    for reason, best in (("", "nsys"), ("nsys is nowhere", "torch")):
        monkeypatch.setattr(nsys, "why_no_nsys", lambda reason=reason: reason)
        assert (choose_source(CPU), choose_source(CUDA)) == ("torch", best)
    assert choose_source(CUDA, "nsys") == "nsys"
    for wrong in ("perf", "nsys"):
        with pytest.raises(ValueError, match=wrong):
            choose_source(CPU, wrong)


def test_nsys_runs_the_same_target(tmp_path, monkeypatch):
    """A machine with a GPU and nsys, as far as the choice of a source goes."""
    commands, ran = [], []

    def fail(command, stem):
        raise ProfileError("nsys made no report; its last words: torch.OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(profile_bench, "resolve_device", lambda device: CUDA)
    monkeypatch.setattr(nsys, "record", lambda command, stem: commands.append(command) or SAMPLE)
    target = Target(model_size="small", pass_="forward", dtype="bfloat16", warmup_steps=2)
    assert profile_model(target, tmp_path / "p", "nsys").source == "nsys"
    monkeypatch.setattr(nsys, "record", fail)
    with pytest.raises(torch.OutOfMemoryError):
        profile_model(target, tmp_path / "p", "nsys")
    monkeypatch.setattr(profile_bench, "prepare", lambda target: lambda: ran.append(target))
    monkeypatch.setattr(profile_bench, "resolve_device", lambda device: CPU)
    profile_bench.main(commands[0][3:])
    assert ran == [target]


@pytest.mark.gpu
def test_torch_profiler_on_a_gpu(tmp_path):
    profile = profile_model(Target(**SMALL | {"device": "cuda"}), tmp_path / "p", "torch")
    assert profile.source == "torch cuda"
    table = kernel_table(profile)
    assert set(stages(table)) == {"forward", "backward", "optimizer"}
    assert table.range.str.contains("/attention/softmax").any()
