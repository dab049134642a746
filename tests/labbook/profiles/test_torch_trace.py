"""torch.profiler traces: a real one from this CPU, a synthetic one as CUDA writes it, and damaged ones."""

import gzip
import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from cs336_systems.nvtx import annotate, recording
from labbook.profiles.table import ProfileError, kernel_table, range_table
from labbook.profiles.torch_trace import read_trace, record_trace


def event(category: str, name: str, ts: float, dur: float, tid: int = 1, **args) -> dict:
    return dict(ph="X", cat=category, name=name, pid=9, tid=tid, ts=ts, dur=dur, args=args)


# One step in microseconds; forward launches a kernel and a copy, backward one from another thread.
EVENTS = json.loads((Path(__file__).parent / "data" / "cuda_trace.json").read_text())["traceEvents"]


def cuda_trace(since: float = 0) -> dict:
    """These events, copied: a test may change them."""
    events = deepcopy(EVENTS)
    for each in events[1:]:
        each["ts"] += since
    return {"traceEvents": events}


@pytest.fixture
def save(tmp_path):
    def write(trace: dict) -> Path:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(trace))
        return path

    return write


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    """Two recorded steps of a small product, and where their trace is."""
    weight = torch.randn(64, 64, requires_grad=True)

    def run():
        for _ in range(2):
            with annotate("measure"):
                with annotate("forward"):
                    loss = torch.softmax(weight @ weight.T, -1).mul(2).sum()
                with annotate("backward"):
                    loss.backward()

    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    with recording():
        return record_trace(run, path, device=torch.device("cpu")), path


def test_cuda_kernels_belong_to_the_range_of_their_launch(save):
    profile = read_trace(save(cuda_trace()))
    table = kernel_table(profile)[["kernel", "range", "class", "total_ms"]]
    assert table.to_numpy().tolist() == [
        ["nvjet_sst_128x64", "measure/backward", "matmul", 0.020],
        ["vectorized_elementwise[mul]", "measure/forward", "elementwise", 0.008],
        ["Memcpy HtoD", "measure/forward", "copy/cast", 0.003],
    ]
    assert profile.kernels.stream.tolist() == [7] * 3
    assert str(profile.kernels.stream[0]) == "7"
    assert range_table(profile).device_busy_ms[0] == pytest.approx(0.031)


def test_a_process_numbered_twice_is_one_and_times_since_1970_keep_nanoseconds(save):
    """In a container CUPTI may tell the process's number outside."""
    trace = cuda_trace(since=1_764_000_000_000_000)
    for e in trace["traceEvents"]:
        if e.get("cat") in ("cuda_runtime", "cuda_driver"):
            e["pid"] = 4242
        if e.get("cat") == "kernel":
            e["dur"] = 1.376
    profile = read_trace(save(trace))
    assert set(kernel_table(profile).range) == {"measure/forward", "measure/backward"}
    kernels = profile.kernels[profile.kernels.kind == "kernel"]
    assert set(kernels.end_ns - kernels.start_ns) == {1376}
    assert kernels.start_ns[0] - kernels.launch_ns[0] == pytest.approx(97_500, abs=250)


def test_cpu_operators_by_range(cpu):
    profile, _ = cpu
    table = kernel_table(profile)
    calls = table.set_index(["range", "kernel"]).calls
    assert calls["measure/forward", "aten::mm"] == 1
    assert calls["measure/backward", "aten::mm"] == 2
    assert calls["measure/forward", "aten::_softmax"] == 1
    assert not table.kernel.str.contains("aten::(?:t|transpose|view|empty|expand)$").any()
    assert set(table.kind) == {"operator"}


def test_an_operator_that_dispatches_to_itself_is_one_call_with_all_its_time(save):
    step = event("user_annotation", "measure", 0, 100)
    to_itself = [
        event("cpu_op", "aten::mm", 10, 30),
        event("cpu_op", "aten::mm", 12, 25),
        event("cpu_op", "aten::fill_", 14, 5),
    ]
    mode_runs_it = [
        event("cpu_op", "aten::mm", 50, 20),
        event("cpu_op", "PythonDispatchMode", 52, 15),
        event("cpu_op", "aten::mm", 54, 10),
    ]
    mode_has_its_result = [
        event("cpu_op", "aten::mm", 80, 5),
        event("cpu_op", "PythonDispatchMode", 81, 3),
    ]
    events = [step] + to_itself + mode_runs_it + mode_has_its_result
    table = kernel_table(read_trace(save({"traceEvents": events}))).set_index("kernel")
    assert table.calls.to_dict() == {"aten::mm": 2, "aten::fill_": 1}
    assert table.total_ms.to_dict() == pytest.approx({"aten::mm": 0.035, "aten::fill_": 0.005})


def test_damaged_files(cpu, tmp_path):
    whole = cpu[1].read_bytes()
    files = {"a.json": gzip.decompress(whole)[:5000], "b.json.gz": whole[:3000], "c.json.gz": b"no"}
    files |= {"d.json": b"[]", "e.json": b'{"traceEvents": 3}'}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ProfileError, match=name):
            read_trace(tmp_path / name)


def test_traces_of_others(save):
    """A mark without a category; a kernel's id carried again by a later call."""
    trace = cuda_trace()
    trace["traceEvents"] += [dict(ph="X", name="a mark", ts=1, dur=1)]
    trace["traceEvents"] += [event("cuda_runtime", "cudaStreamIsCapturing", 130, 1, correlation=1)]
    profile = read_trace(save(trace))
    assert kernel_table(profile).equals(kernel_table(read_trace(save(cuda_trace()))))
    assert len(profile.calls) == 5
    trace["traceEvents"] += [event("user_annotation", "measure", 5000, 100) | {"pid": 10}]
    with pytest.raises(ProfileError, match="several processes"):
        read_trace(save(trace))


def test_a_trace_without_kernels_says_why(save):
    with pytest.raises(ProfileError, match="CUPTI"):
        read_trace(save({"traceEvents": EVENTS[:-3]}))
