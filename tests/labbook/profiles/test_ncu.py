"""Nsight Compute's counters, from a program in its place."""

import sys

import pytest

from labbook.profiles import count_kernels

SAID = """==PROF== Connected to process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void cudnn::dot<1, 64>(int *)","lts__t_bytes.sum","byte","1,234,567.5"
"0","void cudnn::dot<1, 64>(int *)","gpu__time_duration.sum","ns","46,848"
"1","hopper_forward_kernel","lts__t_bytes.sum","byte","8"
"1","hopper_forward_kernel","gpu__time_duration.sum","ns","1,007,900"
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts a program of these lines on PATH as ncu."""

    def put(*lines):
        path = tmp_path / "ncu"
        path.write_text("\n".join([f"#!{sys.executable}", "import sys", *lines]))
        path.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    return put


def test_counters_of_each_kernel(ncu):
    ncu(f"assert sys.argv[-1] == '[1, 2]' and 'a,b' in sys.argv; print({SAID!r})")
    first, second = count_kernels("pass", [1, 2], ["a", "b"])
    wanted = {"kernel": "cudnn::dot", "lts__t_bytes.sum": 1234567.5, "gpu__time_duration.sum": 46848}
    assert first == wanted
    assert (second["kernel"], second["gpu__time_duration.sum"]) == ("hopper_forward_kernel", 1007900)


def test_what_fails_is_a_sentence(ncu):
    with pytest.raises(RuntimeError, match="no ncu on PATH"):
        count_kernels("pass", 0, ["a"])
    for said, status in (("Failed to find metric a", 1), ("No kernels were profiled", 0)):
        ncu(f"print('{said}'); sys.exit({status})")
        with pytest.raises(RuntimeError, match=said):
            count_kernels("pass", 0, ["a"])
