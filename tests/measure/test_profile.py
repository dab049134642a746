"""Attribution of kernels to ranges, and the tables made of it."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.measure.profile import (
    Profile,
    ProfileError,
    attribute,
    class_shares,
    kernel_rows,
    kernel_table,
    one_step,
    range_rows,
    range_table,
    stages,
    top_kernels,
    within,
)
from cs336_systems.measure.rows import load_rows, save_rows

GEMM, MUL = (
    "ampere_sgemm_128x64_tn",
    "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float> >(int)",
)


def ranges(*rows) -> pd.DataFrame:
    """Rows of (name, start, end[, thread[, process]])."""
    rows = [(*row, *(1, 1)[len(row) - 3 :]) for row in rows]
    frame = pd.DataFrame(rows, columns=["name", "start_ns", "end_ns", "thread", "process"])
    return frame[["process", "thread", "name", "start_ns", "end_ns"]]


def kernels(*rows) -> pd.DataFrame:
    """Rows of (name, launch, start, end[, thread[, process]])."""
    rows = [(*row, *(1, 1)[len(row) - 4 :]) for row in rows]
    frame = pd.DataFrame(rows, columns=["name", "launch_ns", "start_ns", "end_ns", "thread", "process"])
    return frame.assign(kind="kernel", grid="1,1,1", stream=7)


def paths(profile: Profile) -> list[str]:
    return list(attribute(profile)["range"])


def a_profile(ranges: pd.DataFrame, kernels: pd.DataFrame) -> Profile:
    return Profile("nsys", "NVIDIA H200", ranges, kernels)


def two_steps() -> Profile:
    """A warm-up and two steps of 100 ns; the kernels run 40 ns after their launch."""
    opened, launched = [], []
    for number, name in enumerate(["warmup", "measure", "measure"]):
        start = 1000 * number
        opened += [
            (name, start, start + 100),
            ("forward", start, start + 60),
            ("backward", start + 60, start + 100),
        ]
        opened += [("layers.0", start + 10, start + 30)]
        launched += [(GEMM, start + 12, start + 52, start + 62), (MUL, start + 40, start + 80, start + 82)]
        # backward is launched by a thread of autograd's own
        launched += [(GEMM, start + 70, start + 110, start + 130, 2)]
    return a_profile(ranges(*opened), kernels(*launched))


def test_a_kernel_belongs_to_the_ranges_open_at_its_launch():
    profile = a_profile(
        ranges(("measure", 0, 100), ("forward", 10, 50), ("softmax", 20, 30)),
        kernels(
            (MUL, 5, 90, 95), (MUL, 15, 95, 96), (MUL, 20, 96, 97), (MUL, 30, 97, 98), (MUL, 100, 110, 120)
        ),
    )
    assert paths(profile) == ["measure", "measure/forward", "measure/forward/softmax", "measure/forward", ""]


def test_attribution_counts_all_threads_of_the_process_and_no_other_process():
    profile = a_profile(
        ranges(("backward", 0, 100), ("other", 0, 100, 1, 2)),
        kernels((GEMM, 50, 60, 70, 1), (GEMM, 50, 70, 80, 99), (GEMM, 50, 60, 70, 1, 2)),
    )
    assert paths(profile) == ["backward", "backward", "other"]


def test_a_range_opened_on_autograds_thread_nests_in_the_main_threads():
    """Activation checkpointing runs a forward, ranges and all, inside backward on another thread."""
    profile = a_profile(
        ranges(("backward", 0, 100, 1), ("layers.0", 10, 20, 2)), kernels((GEMM, 15, 30, 40, 2))
    )
    assert paths(profile) == ["backward/layers.0"]


def test_ranges_that_start_together_nest_by_length():
    profile = a_profile(ranges(("inner", 0, 10), ("outer", 0, 20)), kernels((MUL, 0, 1, 2)))
    assert paths(profile) == ["outer/inner"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=8), st.integers(0, 70))
def test_paths_name_exactly_the_open_ranges(spans, launch):
    rows = [(f"r{number}", start, start + length) for number, (start, length) in enumerate(spans)]
    profile = a_profile(ranges(("all", -1, 100), *rows), kernels((MUL, launch, 80, 81)))
    expected = {"all"} | {name for name, start, end in rows if start <= launch < end}
    assert set(paths(profile)[0].split("/")) == expected


def test_table_is_the_mean_step_without_the_warmup():
    table = kernel_table(two_steps())
    assert table.attrs == {"source": "nsys", "steps": 2, "root": "measure"}
    assert set(table.range) == {"measure/forward/layers.0", "measure/forward", "measure/backward"}
    assert (table.calls == 1).all()
    assert table.total_ms.tolist() == pytest.approx([20e-6, 10e-6, 2e-6])
    assert list(table.columns) == ["range", "kernel", "class", "calls", "total_ms", "grid", "stream", "kind"]


def test_table_of_another_root():
    assert kernel_table(two_steps(), "warmup").attrs["steps"] == 1
    forward = kernel_table(two_steps(), "forward")
    assert forward.attrs["steps"] == 3
    assert set(forward.range) == {"forward", "forward/layers.0"}


def test_unknown_root_lists_the_ranges():
    with pytest.raises(
        ProfileError, match=r"no range 'evaluate'; it has backward, forward, layers\.0, measure, warm"
    ):
        kernel_table(two_steps(), "evaluate")


def test_range_table_tells_busy_from_idle():
    table = range_table(two_steps()).set_index("range")
    step = table.loc["measure"]
    assert step.host_ms == pytest.approx(100e-6)
    assert step.device_span_ms == pytest.approx((130 - 52) * 1e-6)
    assert step.device_busy_ms == pytest.approx((10 + 2 + 20) * 1e-6)
    assert step.device_idle_share == pytest.approx(1 - 32 / 78)
    assert step.calls == 3
    assert set(table.index) == {"measure", "measure/forward", "measure/backward"}


def test_busy_time_counts_overlapping_streams_once():
    profile = a_profile(
        ranges(("measure", 0, 100)), kernels((MUL, 1, 10, 30), (MUL, 2, 20, 40), (MUL, 3, 22, 25))
    )
    assert range_table(profile).device_busy_ms[0] == pytest.approx(30e-6)


def test_shares_add_up_and_stay_visible():
    profile = a_profile(
        ranges(("measure", 0, 100)), kernels((GEMM, 1, 10, 30), (MUL, 2, 30, 40), ("a_new_kernel", 3, 40, 45))
    )
    shares = class_shares(kernel_table(profile)).set_index("class")
    assert shares.share.sum() == pytest.approx(1)
    assert shares.share["other"] == pytest.approx(5 / 35)


def test_optimizer_range_names_the_purpose_of_ordinary_kernels():
    profile = a_profile(
        ranges(("measure", 0, 100), ("optimizer", 50, 100)),
        kernels(
            (MUL, 1, 10, 30), (MUL, 60, 70, 80), (GEMM, 70, 80, 90), ("ncclDevKernel_AllReduce", 80, 90, 99)
        ),
    )
    assert list(attribute(profile)["class"]) == [
        "elementwise",
        "optimizer",
        "matrix product",
        "communication",
    ]


def test_top_kernels_and_selections():
    table = kernel_table(two_steps())
    assert top_kernels(table, 1).kernel.tolist() == [GEMM]
    assert top_kernels(table, 1).calls.tolist() == [2]
    assert stages(table).tolist() == ["backward", "forward", "forward"]
    assert within(table, "forward/layers.0").total_ms.sum() == pytest.approx(10e-6)
    assert within(table, "forward/layers").empty, "a path is made of whole names"


def test_a_profile_without_kernels_or_ranges_says_what_to_do():
    with pytest.raises(ProfileError, match="no kernel in it; see whether the program ran to its end"):
        a_profile(ranges(("measure", 0, 1)), pd.DataFrame())
    with pytest.raises(
        ProfileError, match=r"1 kernels and no ranges to put them in; run the code under ranges\.rec"
    ):
        a_profile(pd.DataFrame(), kernels((MUL, 1, 2, 3)))
    with pytest.raises(ProfileError, match="no kernel in it"):
        a_profile(ranges(("measure", 0, 9)), kernels((MUL, 1, 2, 3)).assign(kind="memcpy"))


def test_a_profile_from_another_machine_is_refused():
    profile = two_steps()
    profile.require_machine("NVIDIA H200")
    with pytest.raises(ProfileError, match="recorded on 'NVIDIA H200', not on 'NVIDIA A100'"):
        profile.require_machine("NVIDIA A100")


def test_rows_sum_layers_and_fold_what_is_small():
    names = [f"layers.{n}" for n in (0, 1)]
    spans = [(name, 100 * n, 100 * n + 90) for n, name in enumerate(names)]
    launches = [(GEMM, 100 * n + 5, 1000 * n, 1000 * n + 900) for n in (0, 1)]
    launches += [(MUL, 100 * n + 10, 1000 * n + 900, 1000 * n + 901) for n in (0, 1)]
    table = kernel_table(a_profile(ranges(("measure", 0, 1000), *spans), kernels(*launches)))
    rows = kernel_rows(table, {"model_size": "tiny"}, smallest_share=0.01)
    key = {"model_size": "tiny", "profiler": "nsys", "range": "measure/layers.*"}
    gemm, rest = sorted(rows, key=lambda row: row["kernel"])
    assert gemm == key | {"kernel": GEMM, "class": "matrix product", "calls": 2, "total_ms": 1800e-6}
    assert rest == key | {
        "kernel": "rest",
        "class": "elementwise",
        "calls": 2,
        "total_ms": pytest.approx(2e-6),
    }
    assert sum(row["total_ms"] for row in rows) == pytest.approx(table.total_ms.sum())


def test_a_kernel_with_a_name_has_all_its_calls():
    """MUL is long in one range and negligible in the other: it must not lose those calls to the rest."""
    spans = [("forward", 0, 90), ("backward", 100, 190)]
    launches = [(MUL, 5, 1000, 1900), (MUL, 105, 2000, 2001), ("tiny", 110, 3000, 3001)]
    table = kernel_table(a_profile(ranges(("measure", 0, 1000), *spans), kernels(*launches)))
    rows = kernel_rows(table, {"model_size": "tiny"}, smallest_share=0.01)
    assert [row["calls"] for row in rows if row["kernel"] == "vectorized_elementwise[mul]"] == [1, 1]
    assert [row["calls"] for row in rows if row["kernel"] == "rest"] == [1]


def test_rows_speak_the_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    profile, key = two_steps(), {"model_size": "tiny"}
    save_rows(kernel_rows(kernel_table(profile), key), "nsys_profile", table="kernels")
    path = save_rows(range_rows(range_table(profile), key), "nsys_profile", table="ranges")
    saved = load_rows("nsys_profile", path.parent.parent.name, table="ranges").set_index("range")
    assert saved.device_idle_share["measure"] == pytest.approx(1 - 32 / 78, rel=1e-5)


def test_one_step_for_a_timeline():
    opened, launched = one_step(two_steps())
    assert opened.name.tolist() == ["measure", "forward", "backward", "layers.0"]
    assert opened.depth.tolist() == [0, 1, 1, 2]
    assert opened.end_ms.tolist() == pytest.approx([100e-6, 60e-6, 100e-6, 30e-6])
    assert launched.start_ms.tolist() == pytest.approx([52e-6, 80e-6, 110e-6])
    assert launched["class"].tolist() == ["matrix product", "elementwise", "matrix product"]
