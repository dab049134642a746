"""Cases under a profiler: rows of two tables, or a row in each that says why not."""

import json
import pickle
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import torch
from torch.profiler import record_function

from labbook.bench import grid
from labbook.profiles import cases, profile_cases, program, read_export
from labbook.profiles.table import ProfileError

SAMPLE = Path(__file__).parent / "data" / "sample.sqlite"


def steps(case):
    """A program: warms up, and returns one measured step."""
    if case.context_length > 1000:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    x = torch.ones(case.context_length, 64) @ torch.ones(64, 64)

    def measured():
        with record_function("measure"), record_function("forward"):
            x.exp()

    return measured


def on_cpu(*context_length):
    chosen = grid(context_length=list(context_length), dtype="float32")
    for case in chosen:
        case.device = torch.device("cpu")
    return chosen


def tables_of(source, folder, *context_length):
    """The tables of some cases: those of more than 5,000 tokens are not tried, those of 32 are kept."""
    found = profile_cases(
        steps,
        on_cpu(*context_length),
        source,
        folder / "x",
        keep=lambda case: case.context_length == 32,
        skip=lambda case: "too large" if case.context_length > 5000 else "",
    )
    return list(found)


def test_torch_profilers_rows_and_one_step_kept(tmp_path):
    skipped, tables, failed, _ = tables_of("torch", tmp_path, 32, 2000, 64, 9999)
    assert {row["range"] for row in tables["ranges"]} == {"measure", "measure/forward"}
    assert {row["kernel"] for row in tables["kernels"]} == {"aten::exp"}
    assert tables["kernels"][0].items() >= {"context_length": 32, "profiler": "torch cpu"}.items()
    assert failed["ranges"][0]["status"] == "oom"
    (row,) = skipped["kernels"]
    assert (row["status"], row["reason"]) == ("skipped", "too large")
    assert [path.name for path in tmp_path.iterdir()] == ["x-32-float32.json.gz"]


def test_what_fails_is_a_row_with_its_reason(tmp_path, monkeypatch):
    def refuse(command, stem):
        raise ProfileError("no step")

    monkeypatch.setattr(cases, "record_report", refuse)
    for tables in tables_of("nsys", tmp_path, 32, 64):
        (row,) = tables["kernels"]
        assert (row["status"], row["reason"]) == ("error", "no step")
    assert not list(tmp_path.iterdir())


def test_one_process_of_nsys_has_the_rows_of_each_case(tmp_path, monkeypatch):
    """A real export in which one measured step stands for one case, and another for the next."""

    def record(command, stem):
        _, recorded = pickle.loads(Path(command[-1]).read_bytes())
        assert [case.context_length for case in recorded] == [32, 64, 2000]
        Path(f"{command[-1]}.json").write_text(json.dumps(["", "", "CUDA out of memory"]))
        Path(f"{stem}.nsys-rep").touch()
        return SAMPLE

    def read(path):
        profile = read_export(path)
        steps = profile.ranges[profile.ranges.name == "measure"]
        for number, step in enumerate(steps.itertuples()):
            for frame, time in ((profile.ranges, "start_ns"), (profile.kernels, "launch_ns")):
                inside = frame[time].between(step.start_ns, step.end_ns)
                frame.loc[inside, "range"] = f"case {number}/" + frame.range
        return profile

    monkeypatch.setattr(cases, "record_report", record)
    monkeypatch.setattr(cases, "read_export", read)
    *measured, failed = tables_of("nsys", tmp_path, 32, 64, 2000)
    for tables in measured:
        calls = {row["range"]: row["calls"] for row in tables["ranges"]}
        assert calls["measure/forward"] == 40
        assert calls["measure/backward"] == 76, "75 kernels, and a memset"
    assert measured[0]["ranges"][0]["profiler"] == "nsys"
    assert failed["kernels"][0]["reason"] == "CUDA out of memory"
    assert [path.name for path in tmp_path.iterdir()] == ["x.nsys-rep"]


def test_nsyss_process_runs_every_case_in_a_range_of_its_own(tmp_path, monkeypatch):
    log = []

    @contextmanager
    def noted(name="recording"):
        log.append(f"{name} begins")
        yield
        log.append(f"{name} ends")

    monkeypatch.setattr(torch.cuda.profiler, "profile", noted)
    monkeypatch.setattr(torch.cuda.nvtx, "range", noted)
    path = tmp_path / "program"
    path.write_bytes(cloudpickle.dumps((steps, on_cpu(2000, 32))))
    program.main(str(path))
    assert log == ["recording begins", "case 1 begins", "case 1 ends", "recording ends"]
    first, second = json.loads((tmp_path / "program.json").read_text())
    assert "out of memory" in first
    assert not second
