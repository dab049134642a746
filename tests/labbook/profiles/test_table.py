"""Attribution of kernels to ranges, and the tables made of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labbook.profiles import kernel_table, one_step, stages
from labbook.profiles.table import ProfileError, kernel_rows, range_table

GEMM = "ampere_sgemm_128x64_tn"
MUL = "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float> >(int)"


@pytest.fixture
def two_steps(a_profile):
    """A warm-up and two steps of 100 ns; the kernels run 40 ns after their launch."""
    ranges = []
    kernels = []
    for t, name in ((0, "warmup"), (1000, "measure"), (2000, "measure")):
        ranges += [
            (name, t, t + 100),
            ("forward", t, t + 60),
            ("layers.0", t + 10, t + 30),
            ("backward", t + 60, t + 100),
        ]
        kernels += [
            (GEMM, t + 12, t + 52, t + 62),
            (MUL, t + 40, t + 80, t + 82),
            (GEMM, t + 70, t + 110, t + 130),
        ]
    return a_profile(ranges, kernels)


def test_a_range_with_a_slash_is_one_range(a_profile):
    ranges = [
        ("measure", 0, 100),
        ("data/tokens", 10, 20),
        ("forward/attention", 30, 50),
    ]
    profile = a_profile(ranges, [(GEMM, 15, 60, 70), (GEMM, 35, 80, 90)])
    assert stages(profile.kernels).tolist() == ["data:tokens", "forward:attention"]
    assert range_table(profile).calls.tolist() == [2, 1, 1]
    assert kernel_table(profile, "data/tokens").calls.tolist() == [1]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=8), st.integers(0, 70))
def test_paths_name_exactly_the_open_ranges_the_longest_first(a_profile, spans, launch):
    ranges = [("all", -1, 100)]
    for number, (start, length) in enumerate(spans):
        ranges.append((f"r{number}", start, start + length))
    path = a_profile(ranges, [(MUL, launch, 80, 81)]).kernels.range[0].split("/")
    assert set(path) == {name for name, start, end in ranges if start <= launch < end}
    place = {name: (start, -end) for name, start, end in ranges}
    assert path == sorted(path, key=place.get)


def test_the_kernel_table_is_the_mean_step_without_the_warmup(two_steps):
    table = kernel_table(two_steps)
    times = {
        "measure/backward": 20e-6,
        "measure/forward/layers.0": 10e-6,
        "measure/forward": 2e-6,
    }
    assert table.set_index("range").total_ms.to_dict() == pytest.approx(times)
    assert (table.calls == 1).all()
    assert stages(table).tolist() == ["backward", "forward", "forward"]
    assert set(kernel_table(two_steps, "forward").range) == {"forward", "forward/layers.0"}
    with pytest.raises(ProfileError, match=r"'evaluate'.*forward, .*backward"):
        kernel_table(two_steps, "evaluate")


def test_range_table_tells_host_from_device(two_steps, a_profile):
    table = range_table(two_steps).set_index("range")
    assert set(table.index) == {"measure", "measure/forward", "measure/backward"}
    step = [1e-4, 32e-6, 3]  # host, device, calls
    assert table.loc["measure"].tolist() == pytest.approx(step)
    on_two_streams = [
        (MUL, 1, 10, 30),
        (MUL, 2, 20, 40, 8),
        (MUL, 3, 22, 25),
    ]
    table = range_table(a_profile([("measure", 0, 100)], on_two_streams))
    assert table.device_busy_ms[0] == pytest.approx(30e-6), "what overlaps counts once"


def test_the_optimizers_range_names_the_purpose_of_ordinary_kernels(a_profile):
    launches = [
        (MUL, 1, 10, 30),
        (MUL, 60, 70, 80),
        (GEMM, 70, 80, 90),
        ("ncclDevKernel", 80, 90, 99),
    ]
    found = a_profile([("measure", 0, 100), ("optimizer", 50, 100)], launches).kernels
    assert found["class"].tolist() == ["elementwise", "optimizer", "matmul", "communication"]


def test_rows_sum_layers_and_fold_what_is_small(a_profile):
    """MUL is long in forward and negligible in backward: it must not lose those calls to the rest."""
    spans = [
        ("measure", 0, 1000),
        ("forward", 0, 200),
        ("layers.0", 0, 90),
        ("layers.1", 100, 190),
        ("backward", 200, 300),
    ]
    kernels = [
        (MUL, 10, 1000, 1900),
        (MUL, 110, 101_000, 101_900),
        (MUL, 205, 302, 303),
        ("tiny", 110, 303, 304),
        ("tiny", 210, 304, 305),
    ]
    table = kernel_table(a_profile(spans, kernels))
    rows = kernel_rows(table)
    calls = {(row["range"], row["kernel"]): row["calls"] for row in rows}
    assert calls == {
        ("measure/forward/layers.*", "vectorized_elementwise[mul]"): 2,
        ("measure/backward", "vectorized_elementwise[mul]"): 1,
        ("measure/forward/layers.*", "rest"): 1,
        ("measure/backward", "rest"): 1,
    }
    assert sum(row["total_ms"] for row in rows) == pytest.approx(table.total_ms.sum())


def test_one_step_for_a_timeline(two_steps):
    opened, launched, calls = one_step(two_steps)
    assert opened.name.tolist() == ["measure", "forward", "layers.0", "backward"]
    assert opened.depth.tolist() == [0, 1, 2, 1]
    assert opened.end_ms.tolist() == pytest.approx([100e-6, 60e-6, 30e-6, 100e-6])
    assert calls.start_ms.tolist() == pytest.approx([12e-6, 40e-6, 70e-6])
    assert launched.start_ms.tolist() == pytest.approx([52e-6, 80e-6, 110e-6])
    assert launched["range"].tolist() == [
        "measure/forward/layers.0",
        "measure/forward",
        "measure/backward",
    ]
