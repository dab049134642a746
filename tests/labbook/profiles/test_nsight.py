"""Nsight Systems exports, a real one and synthetic ones; and Nsight Compute's counters."""

import sqlite3
import sys
from pathlib import Path

import pytest

from labbook.profiles.nsight import count_kernels, read_export, record_report
from labbook.profiles.table import ProfileError, kernel_table, one_step

SAMPLE = Path(__file__).parent / "data" / "sample.sqlite"
PROCESS = 5 << 24
MAIN = PROCESS + 1
AUTOGRAD = PROCESS + 2

SCHEMA = """
CREATE TABLE StringIds (id INTEGER, value TEXT);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
    (start, end, streamId, correlationId, globalPid, demangledName, gridX, gridY, gridZ);
CREATE TABLE NVTX_EVENTS (start, end, text, textId, globalTid, domainId, eventType);
INSERT INTO StringIds VALUES (1, 'ampere_sgemm_128x64_tn'), (2, 'backward'),
    (3, 'cudaLaunchKernel_v7000'), (4, 'cudaDeviceSynchronize_v3020');
"""


@pytest.fixture
def make_export(tmp_path):
    """An export of one step: forward launches a kernel from the main thread, backward one from autograd's."""

    def make(*more: str) -> Path:
        path = tmp_path / "profile.sqlite"
        with sqlite3.connect(path) as export:
            export.executescript(SCHEMA)
            for event in ((0, 100, "measure", None), (10, 40, "forward", None), (50, 90, None, 2)):
                row = tuple(event) + (MAIN, 0, 59)
                export.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            for correlation, launch, thread in [(1, 20, MAIN), (2, 60, AUTOGRAD)]:
                row = (launch, launch + 1, thread, correlation, 3)
                export.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", row
                )
                row = (launch + 100, launch + 110, 7, correlation, PROCESS, 1, 4, 2, 1)
                export.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES {row}")
            for statement in more:
                export.execute(statement)
        export.close()
        return path

    return make


def test_the_measured_steps_of_the_real_export():
    """Its first optimizer step, of the warm-up, makes the state: 38 kernels."""
    profile = read_export(SAMPLE)
    table = kernel_table(profile)
    assert table.calls.sum() == pytest.approx(len(one_step(profile)[1])), "its steps are alike"
    of_kernels = table[table.kind == "kernel"]
    for stage, count in {"forward": 40, "backward": 75, "optimizer step": 8}.items():
        calls = of_kernels[of_kernels.range.str.startswith(f"measure/{stage}")].calls
        assert calls.sum() == pytest.approx(count)
    softmax = table[
        table.range.str.endswith("forward/scaled dot product attention/computing softmax")
    ]
    assert softmax.kernel.tolist() == ["softmax_warp_forward"]
    assert softmax.calls.tolist() == [2]
    assert set(table[table.kind == "memset"].kernel) == {"Memset"}
    assert not (table["class"] == "other").any()
    _, kernels, calls = one_step(profile)
    assert calls.name.str.contains("Launch").sum() >= (kernels["class"] != "copy/cast").sum() > 100


def test_kernels_join_launches_of_their_own_process(make_export):
    """Correlation ids are counted per process: two ranks of one job use the same ones."""
    other = 6 << 24
    path = make_export(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (500, 501, {other + 1}, 1, 3)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (510, 520, 7, 1, {other}, 1, 1, 1, 1)",
    )
    assert sorted(read_export(path).kernels.launch_ns) == [20, 60, 500]


def test_a_kernel_counts_once_in_the_range_of_its_launch_whatever_calls_carry_its_id(make_export):
    """The runtime's call and the driver's inside it, and one of the same id long after.

    Attributed by thread, as one published report did it, backward would have no kernel at all.
    """
    call = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({0}, {0}, {1}, 1, 3)"
    table = kernel_table(read_export(make_export(*(call.format(at, MAIN) for at in (21, 300)))))
    calls = dict(zip(table.range, table.calls, strict=True))
    assert calls == {"measure/forward": 1, "measure/backward": 1}
    assert table.stream.tolist() == [7, 7]


def test_what_else_an_export_may_hold(make_export):
    columns = "start, end, streamId, correlationId, globalPid, graphId"
    path = make_export(
        f"INSERT INTO NVTX_EVENTS VALUES (12, 30, 'ncclAllReduce', NULL, {MAIN}, 3, 59)",  # a library's own
        f"INSERT INTO NVTX_EVENTS VALUES (15, NULL, 'a mark', NULL, {MAIN}, 0, 34)",  # no range
        f"INSERT INTO NVTX_EVENTS VALUES (55, NULL, 'open', NULL, {MAIN}, 0, 59)",  # still open at the end
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({columns})",  # a graph traced as a whole
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (30, 31, {MAIN}, 9, 3)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (200, 1200, 7, 9, {PROCESS}, 1)",
    )
    table = kernel_table(read_export(path)).sort_values(["kind", "range"])
    assert table.range.tolist() == ["measure/forward", "measure/backward/open", "measure/forward"]
    assert table.kernel[0] == "CUDA graph"
    assert table.total_ms[0] == pytest.approx(1e-3)


def test_what_is_no_export(tmp_path):
    with pytest.raises(ProfileError, match="none"):
        read_export(tmp_path / "none.sqlite")
    path = tmp_path / "bad.sqlite"
    cut_off = [SAMPLE.read_bytes()[:kept] for kept in (0, 50, 5000, 390_000)]
    for content in list(cut_off) + [b"kernel,calls\n" * 100]:
        path.write_bytes(content)
        with pytest.raises(ProfileError, match="bad"):
            read_export(path)


LACKING = {
    "ALTER TABLE NVTX_EVENTS DROP COLUMN textId": "textId",
    "DROP TABLE NVTX_EVENTS": "no ranges",
    "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL": "no kernel",
    "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME": "no calls of the CUDA API",
    "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 0 WHERE start > 150": "1 of 7 .*end after",
    "UPDATE NVTX_EVENTS SET textId = 99, text = NULL WHERE start = 50": "of 7 .*range.* name",
}


@pytest.mark.parametrize("statement", LACKING)
def test_what_an_export_lacks(make_export, statement):
    with pytest.raises(ProfileError, match=LACKING[statement]):
        read_export(make_export(statement))


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Puts a program on PATH, by its name, before the system's: put("nsys", *lines)."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def put(name: str, *lines: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text("\n".join(lines))
        path.chmod(0o755)

    return put


@pytest.fixture
def put_nsys(tmp_path, put):
    """Puts a script on PATH as nsys, which writes its arguments down; $out is the file that it is to make."""
    with pytest.raises(ProfileError, match="install Nsight Systems"):
        record_report(["train"], tmp_path / "profile")
    start = ["#!/bin/bash", f'echo "$*" >> {tmp_path}/log']
    start += ["for word; do case $word in --output=*) out=${word#--output=};; esac; done"]
    return lambda line: put("nsys", *start, line)


def test_nsys_on_path(put_nsys, tmp_path):
    put_nsys(f"echo report > $out.nsys-rep; cp {SAMPLE} $out.sqlite; exit 0")
    export = record_report(["python", "-m", "target"], tmp_path / "profile")
    assert export == tmp_path / "profile.sqlite"
    assert len(read_export(export).kernels) > 100
    (profile,) = (tmp_path / "log").read_text().splitlines()
    assert "--trace=cuda,nvtx" in profile
    assert "--force-overwrite" in profile, "an older report would stand for it"
    assert "--capture-range=cudaProfilerApi" in profile, "warm-up is not captured"
    assert profile.endswith("python -m target")


def test_a_traceback_is_a_failure_even_with_a_report(put_nsys, tmp_path):
    """A program that fails in its second step leaves a report of the first."""
    said = "Traceback (most recent call last):\nKeyError: 3\nGenerating report"
    put_nsys(f"echo > $out.nsys-rep; echo > $out.sqlite; echo '{said}'")
    with pytest.raises(ProfileError, match=r"under nsys: .*KeyError: 3"):
        record_report(["train"], tmp_path / "profile")


def test_without_a_report_the_command_has_failed(put_nsys, tmp_path):
    put_nsys("touch $out.nsys-rep; exit 1")
    with pytest.raises(ProfileError, match=r"train.* failed under nsys"):
        record_report(["train"], tmp_path / "profile")


PYTHON = (f"#!{sys.executable}", "import sys")
SAID = """==PROF== Connected to process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void cudnn::dot<1, 64>(int *)","lts__t_bytes.sum","byte","1,234,567.5"
"0","void cudnn::dot<1, 64>(int *)","gpu__time_duration.sum","ns","46,848"
"1","hopper_forward_kernel","lts__t_bytes.sum","byte","8"
"1","hopper_forward_kernel","gpu__time_duration.sum","ns","1,007,900"
"""


def test_counters_of_each_kernel(put):
    put(
        "ncu",
        *PYTHON,
        f"assert sys.argv[-1] == '[1, 2]' and '--metrics=a,b' in sys.argv; print({SAID!r})",
    )
    first, second = count_kernels("pass", [1, 2], ["a", "b"])
    wanted = {
        "kernel": "cudnn::dot",
        "lts__t_bytes.sum": 1234567.5,
        "gpu__time_duration.sum": 46848,
    }
    assert first == wanted
    assert (second["kernel"], second["gpu__time_duration.sum"]) == (
        "hopper_forward_kernel",
        1007900,
    )


def test_what_fails_is_a_sentence(put):
    with pytest.raises(FileNotFoundError, match="ncu"):
        count_kernels("pass", 0, ["a"])
    for said, status in (("Failed to find metric a", 1), ("No kernels were profiled", 0)):
        put("ncu", *PYTHON, f"print('{said}'); sys.exit({status})")
        with pytest.raises(RuntimeError, match=said):
            count_kernels("pass", 0, ["a"])
