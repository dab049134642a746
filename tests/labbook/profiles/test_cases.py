"""A case under a profiler: rows of two tables, or a row in each that says why not."""

import cloudpickle
import pytest
import torch
from torch.profiler import record_function

from labbook.profiles import ProfileError, cases, profile_rows, program

CPU = torch.device("cpu")


def steps():
    """A program: warms up, and returns one measured step."""
    x = torch.ones(64, 64) @ torch.ones(64, 64)

    def measured():
        with record_function("measure"), record_function("forward"):
            (x @ x).exp()

    return measured


@pytest.mark.parametrize("keep", [False, True])
def test_torch_profilers_rows_and_one_step_kept(tmp_path, keep):
    tables = profile_rows(steps, "torch", tmp_path / "small-32", device=CPU, keep=keep)
    assert {row["range"] for row in tables["ranges"]} == {"measure", "measure/forward"}
    assert {"aten::mm", "aten::exp"} <= {row["kernel"] for row in tables["kernels"]}
    assert [path.name for path in tmp_path.iterdir()] == ["small-32.json.gz"] * keep


def test_a_case_that_cannot_run_is_not_started(tmp_path):
    tables = profile_rows(None, "torch", tmp_path / "x", device=CPU, keep=True, skip="too large")
    assert tables["kernels"] == [{"status": "skipped", "reason": "too large"}] == tables["ranges"]


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


@pytest.mark.parametrize(
    ("error", "status"),
    [("it failed under nsys: OutOfMemoryError: CUDA out of memory", "oom"), ("no step", "error")],
)
def test_what_fails_is_a_row_with_its_reason(tmp_path, monkeypatch, error, status):
    tables = profile_rows(out_of_memory, "torch", tmp_path / "x", device=CPU, keep=True)
    assert tables["ranges"][0]["status"] == "oom"

    def refuse(command, stem):
        raise ProfileError(error)

    monkeypatch.setattr(cases, "record_report", refuse)
    tables = profile_rows(steps, "nsys", tmp_path / "x", device=CPU, keep=True)
    assert tables["kernels"] == [{"status": status, "reason": error}] == tables["ranges"]
    assert not list(tmp_path.iterdir())


def test_nsyss_process_records_the_measured_steps_alone(tmp_path, monkeypatch):
    log = tmp_path / "log"

    def write(word):
        with open(log, "a") as file:
            print(word, file=file)

    def warm_up():
        write("warm-up")
        return lambda: write("measured")

    class Recording:
        def __enter__(self):
            write("start")

        def __exit__(self, *exception):
            write("stop")

    monkeypatch.setattr(torch.cuda.profiler, "profile", Recording)
    (tmp_path / "program").write_bytes(cloudpickle.dumps(warm_up))
    program.main(str(tmp_path / "program"))
    assert log.read_text().split() == ["warm-up", "start", "measured", "stop"]
