"""Profiling a model of the workbook, and the choice of the profiler."""

from pathlib import Path

import pytest
import torch

from cs336_systems.bench import profile_bench as profiling
from cs336_systems.bench.profile_bench import (
    Target,
    choose_source,
    main,
    prepare,
    profile_model,
    profile_rows,
    read_profile,
)
from cs336_systems.measure import nsys
from cs336_systems.measure.model_steps import ModelSteps
from cs336_systems.measure.profile import (
    ProfileError,
    class_shares,
    kernel_table,
    range_table,
    stages,
    within,
)
from cs336_systems.measure.rows import load_rows, save_rows
from cs336_systems.model import build_model

SAMPLE = Path(__file__).parent / "data" / "sample.sqlite"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {"context_length": 16, "batch_size": 2, "device": "cpu", "warmup_steps": 1, "steps": 2}


def test_a_train_step_on_the_cpu(tmp_path):
    profile = profile_model(Target(**SMALL), tmp_path / "tiny")
    assert (tmp_path / "tiny.json").exists()
    table = kernel_table(profile)
    assert table.attrs == {"source": "torch cpu", "steps": 2, "root": "measure"}
    assert set(stages(table)) == {"forward", "backward", "optimizer"}
    assert set(table[stages(table) == "optimizer"]["class"]) == {"optimizer"}

    calls = table.groupby(["range", "kernel"]).calls.sum()
    layer = "measure/forward/layers.1"
    for module in ("attn/q_proj", "attn/output_proj", "ffn/w1", "ffn/w3", "ffn/w2"):
        assert calls[f"{layer}/{module}", "aten::mm"] == 1
    for step in ("scores", "values"):
        assert calls[f"{layer}/attn/attention/{step}", "aten::bmm"] == 1
    # Each of forward's 2 * 7 + 1 linear layers and 2 * 2 products of attention has two products in backward.
    products = table[table.kernel.isin(["aten::mm", "aten::bmm"])]
    assert within(products, "forward").calls.sum() == 15 + 4
    assert within(products, "backward").calls.sum() == 2 * (15 + 4)


@pytest.mark.parametrize(("pass_", "stages_"), [("forward", {"forward"}), ("backward", {"backward"})])
def test_other_passes(tmp_path, pass_, stages_):
    table = kernel_table(profile_model(Target(pass_=pass_, **SMALL), tmp_path / "p"))
    assert set(stages(table)) == stages_, "what a pass needs first is prepared outside the range"


def test_rows_of_a_newer_profile_leave_none_of_an_older():
    target = Target(pass_="forward", **SMALL)
    tables = profile_rows(target)
    assert {row["range"] for row in tables["ranges"]} == {"measure", "measure/forward"}
    old = [target.key() | {"profiler": "torch cpu", "range": "measure", "kernel": "gone", "calls": 1}]
    other = [row | {"batch_size": 64} for row in old] + [row | {"profiler": "nsys"} for row in old]
    save_rows(old + other, "nsys_profile", table="kernels")
    replacing = target.key() | {"profiler": tables["kernels"][0]["profiler"]}
    path = save_rows(tables["kernels"], "nsys_profile", table="kernels", replacing=replacing)
    saved = load_rows("nsys_profile", path.parent.parent.name, table="kernels")
    assert len(saved[saved.kernel == "gone"]) == 2, "those of another batch and of another profiler"
    assert len(saved) == len(tables["kernels"]) + 2


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

    monkeypatch.setattr(profiling, "profile_model", fail)
    target = Target(**SMALL)
    for rows in profile_rows(target).values():
        assert [row["status"] for row in rows] == [status]
        assert rows[0]["profiler"] == "torch cpu", "the next one that works replaces it"
        save_rows(rows, "nsys_profile", table="failed")


def test_one_step_is_kept(tmp_path):
    kept = tmp_path / "traces" / "tiny.json.gz"
    tables = profile_rows(Target(**SMALL), keep=kept)
    profile = read_profile(kept, "cpu")
    assert kernel_table(profile).attrs["steps"] == 1
    assert {row["range"] for row in tables["ranges"]} == set(range_table(profile).range)


def test_profiles_of_this_machine_only(tmp_path):
    saved = profile_model(Target(**SMALL), tmp_path / "p")
    again = read_profile(tmp_path / "p.json", "cpu")
    assert kernel_table(again).equals(kernel_table(saved))
    with pytest.raises(ProfileError, match="recorded on 'NVIDIA H200', not on"):
        read_profile(SAMPLE, "cpu")


def test_warmup_is_not_recorded(monkeypatch):
    opened = []
    monkeypatch.setattr(profiling, "annotate", lambda name: opened.append(name) or profiling.nullcontext())
    monkeypatch.setattr(
        profiling, "recording", lambda *models: opened.append("recording") or profiling.nullcontext()
    )
    measured = prepare(Target(**SMALL))
    assert opened == ["measure"], "one warm-up step, with ranges off"
    measured()
    assert opened == ["measure", "recording", "measure", "measure"]


def test_steps_agree_with_each_other():
    torch.manual_seed(0)
    target = Target(**SMALL)
    steps = ModelSteps(build_model(target.config, 16), 2, 16)
    steps.forward()
    assert all(p.grad is None for p in steps.model.parameters())
    steps.forward_backward()
    gradients = [p.grad.clone() for p in steps.model.parameters()]
    step, before = steps.of("backward")
    step(before())
    assert all(torch.equal(p.grad, g) for p, g in zip(steps.model.parameters(), gradients, strict=True))
    before = steps.model.lm_head.weight.clone()
    steps.train_step()
    assert not torch.equal(before, steps.model.lm_head.weight)


def test_autocast_is_the_dtype():
    steps = ModelSteps(build_model(Target().config, 16), 2, 16, "bfloat16")
    seen = []
    steps.model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    steps.forward()
    assert seen == [torch.bfloat16]
    with pytest.raises(ValueError, match="dtype 'int8' is unknown; allowed: float32, tf32"):
        ModelSteps(steps.model, 2, 16, "int8")


@pytest.mark.parametrize(
    ("device", "there", "asked", "chosen"),
    [
        (CPU, True, "auto", "torch"),
        (CUDA, True, "auto", "nsys"),
        (CUDA, False, "auto", "torch"),
        (CUDA, True, "torch", "torch"),
        (CUDA, True, "nsys", "nsys"),
    ],
)
def test_the_best_source_that_is_there(monkeypatch, device, there, asked, chosen):
    monkeypatch.setattr(nsys, "why_no_nsys", lambda: "" if there else "nsys is nowhere")
    assert choose_source(device, asked) == chosen


def test_sources_that_cannot_be():
    with pytest.raises(ValueError, match="source 'perf' is unknown; allowed: auto, nsys, torch"):
        choose_source(CPU, "perf")
    with pytest.raises(ValueError, match="'nsys' sees GPU kernels only; allowed on a cpu: auto, torch"):
        choose_source(CPU, "nsys")


@pytest.fixture
def nsys_on_cuda(monkeypatch):
    """A machine with a GPU and nsys, as far as the choice of a source goes; returns the commands recorded."""
    commands = []
    monkeypatch.setattr(profiling, "resolve_device", lambda device: CUDA)
    monkeypatch.setattr(nsys, "record", lambda command, stem: commands.append(command) or SAMPLE)
    return commands


def test_nsys_runs_the_same_target(nsys_on_cuda, tmp_path, monkeypatch):
    target = Target(model_size="small", pass_="forward", dtype="bfloat16", warmup_steps=2)
    assert profile_model(target, tmp_path / "p", "nsys").source == "nsys"
    assert nsys_on_cuda[0][1:3] == ["-m", "cs336_systems.bench.profile_bench"]
    ran = []
    monkeypatch.setattr(profiling, "prepare", lambda target: lambda: ran.append(target))
    monkeypatch.setattr(profiling, "resolve_device", lambda device: CPU)
    main(nsys_on_cuda[0][3:])
    assert ran == [target]


def test_out_of_memory_in_the_other_process(nsys_on_cuda, tmp_path, monkeypatch):
    def fail(command, stem):
        raise ProfileError("nsys made no report; its last words: torch.OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(nsys, "record", fail)
    with pytest.raises(torch.OutOfMemoryError, match="its last words"):
        profile_model(Target(), tmp_path / "p", "nsys")


@pytest.mark.gpu
def test_both_profilers_agree_on_a_gpu(tmp_path):
    if reason := nsys.why_no_nsys():
        pytest.skip(reason)
    target = Target(model_size="small", context_length=512, pass_="forward_backward", device="cuda")
    by_nsys, by_torch = (
        class_shares(kernel_table(profile_model(target, tmp_path / source, source))).set_index("class")
        for source in ("nsys", "torch")
    )
    assert by_nsys.calls.to_dict() == pytest.approx(by_torch.calls.to_dict())
    counts = by_torch.share > 0.01  # a class of a few short kernels varies from step to step
    assert by_nsys.total_ms[counts].to_dict() == pytest.approx(by_torch.total_ms[counts].to_dict(), rel=0.05)
    assert by_nsys.share.get("other", 0) < 0.02


@pytest.mark.gpu
def test_torch_profiler_on_a_gpu(tmp_path):
    profile = profile_model(Target(**SMALL | {"device": "cuda"}), tmp_path / "p", "torch")
    assert profile.source == "torch cuda"
    table = kernel_table(profile)
    assert set(stages(table)) == {"forward", "backward", "optimizer"}
    assert within(table, "attention/softmax").calls.sum() > 0
    assert not table.range.isna().any()
