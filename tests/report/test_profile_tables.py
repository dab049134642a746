"""Summaries of kernel rows, over made-up runs whose every number can be added up by hand."""

import pandas as pd
import pytest

from cs336_systems import accounting, configs
from cs336_systems.report import (
    attention_parts,
    beside_wall_clock,
    by_scope,
    leaders,
    of_main_profiler,
    shares,
    softmax_over_matmuls,
    two_profilers,
)  # fmt: skip

KEY = {
    "profiler": "torch cuda", "implementation": "eager", "attention": "plain", "edition": 2025,
    "model_size": "small", "batch_size": 4, "context_length": 128, "dtype": "float32", "status": "ok",
}  # fmt: skip


def run(pass_: str, *kernels: tuple, **key) -> pd.DataFrame:
    """Rows of one run; a kernel is (range below measure, name, class, calls, total_ms)."""
    names = ("range", "kernel", "class", "calls", "total_ms")
    return pd.DataFrame(
        KEY | key | {"pass": pass_} | dict(zip(names, (f"measure/{each[0]}", *each[1:]), strict=True))
        for each in kernels
    )


INFERENCE = run(
    "forward",
    ("forward/layers.*/ffn/w1", "gemm", "matmul", 12, 6.0),
    ("forward/layers.*/ffn", "mul", "elementwise", 24, 1.0),
    ("forward/layers.*/attn/rope", "mul", "elementwise", 24, 0.5),
    ("forward/lm_head", "rest", "other", 3, 0.5),
)
STEP = run(
    "train_step",
    ("forward/layers.*/ffn/w1", "gemm", "matmul", 12, 6.0),
    ("backward", "gemm", "matmul", 12, 6.0),
    ("backward", "gemm_nt", "matmul", 12, 7.0),
    ("optimizer", "mul", "optimizer", 300, 5.0),
    ("", "copy", "copy/cast", 1, 1.0),
)


def test_scopes_are_parts_of_runs_and_forward_and_backward_count_once():
    """Where a training step was profiled, the pass alone is not added; where none fits, it stands."""
    scoped = by_scope(pd.concat([INFERENCE, STEP]))
    total = scoped.groupby("scope").total_ms.sum()
    assert total.to_dict() == {"inference": 8.0, "forward + backward": 19.0, "training step": 25.0}
    alone = STEP[STEP.range.str.contains("ward")].assign(**{"pass": "forward_backward"})
    other = alone.assign(model_size="2.7B")
    failed = other.iloc[:1].assign(**{"pass": "train_step", "status": "oom", "range": None, "total_ms": None})
    scoped = by_scope(pd.concat([STEP, alone, other, failed]))
    both = scoped[scoped.scope == "forward + backward"].groupby("model_size").total_ms.sum()
    assert both.to_dict() == {"small": 19.0, "2.7B": 19.0}


def test_shares_and_the_leader_are_of_all_the_time_the_rest_included():
    scoped = by_scope(pd.concat([INFERENCE, INFERENCE.assign(context_length=256), STEP]))
    table = shares(scoped)
    assert table.groupby(["context_length", "scope"]).share.sum().tolist() == pytest.approx([1] * 4)
    of_small = table[(table.context_length == 128) & (table.scope == "inference")].set_index("class").share
    assert (of_small["matmul"], of_small["other"]) == (6 / 8, 0.5 / 8)
    table = leaders(by_scope(pd.concat([INFERENCE, STEP]))).set_index("scope")
    assert table.kernel.to_dict() == dict.fromkeys(table.index, "gemm")
    assert table.calls.to_dict() == {"inference": 12, "forward + backward": 24, "training step": 24}
    assert (table.share["training step"], table.share["inference"]) == (12 / 25, 6 / 8)
    most_in_rest = INFERENCE.replace({"total_ms": {0.5: 50.0}})
    assert leaders(by_scope(most_in_rest)).kernel.tolist() == ["mul"], "the rest is many kernels"


def test_no_rows_are_no_lines():
    nothing = by_scope(INFERENCE.iloc[:0])
    for table in (shares(nothing), leaders(nothing), two_profilers(nothing), of_main_profiler(nothing)):
        assert table.empty
    assert softmax_over_matmuls(attention_parts(nothing)).empty


def test_parts_of_attention():
    inside = "forward/layers.*/attn/attention"
    attention = run(
        "forward",
        (f"{inside}/scores", "gemm", "matmul", 12, 2.0),
        (f"{inside}/scores", "div", "elementwise", 12, 0.7),
        (f"{inside}/scores", "copy", "copy/cast", 12, 0.3),
        (f"{inside}/softmax", "exp", "elementwise", 12, 3.0),
        (f"{inside}/softmax", "amax", "reduction", 12, 1.0),
        (f"{inside}/values", "gemm", "matmul", 12, 2.0),
        ("forward/layers.*/attn/q_proj", "gemm", "matmul", 12, 9.0),
    )
    parts = attention_parts(attention).set_index("part")
    times = {"scores": 2.0, "scale and mask": 1.0, "softmax": 4.0, "values": 2.0}
    assert parts.total_ms.to_dict() == pytest.approx(times)
    small = configs.model_size("small", 2025)
    matmuls = parts.flops["scores"] + parts.flops["values"]
    breakdown = accounting.flops_breakdown(small, 4, 128)
    assert matmuls == breakdown["attention_scores"] + breakdown["attention_values"]
    over = softmax_over_matmuls(attention_parts(attention)).iloc[0]
    assert over.time_ratio == pytest.approx(1.0)
    assert over.flops_ratio == pytest.approx(5 / (4 * small.d_head))
    assert 1 < over.bytes_ratio < 4


def test_two_profilers_of_one_run_and_the_main_one():
    by_nsys = INFERENCE.assign(profiler="nsys", total_ms=INFERENCE.total_ms * 1.01)
    assert set(of_main_profiler(pd.concat([by_nsys] * 3 + [INFERENCE, STEP])).profiler) == {"torch cuda"}
    table = two_profilers(pd.concat([INFERENCE, STEP, by_nsys]))
    assert set(table["pass"]) == {"forward"}, "only what both saw"
    assert table.ratio.tolist() == pytest.approx([1.01] * 3)
    missed = by_nsys[by_nsys["class"] != "other"]
    table = two_profilers(pd.concat([INFERENCE, missed])).set_index("class")
    assert table.ratio["other"] == 0, "a class that one of them did not see is shown"


def test_idle_is_the_part_of_the_wall_clock_without_a_kernel():
    profiled = KEY | {"pass": "forward", "range": "measure", "host_ms": 30.0, "device_busy_ms": 8.0}
    inner = profiled | {"range": "measure/forward"}
    clock = KEY | {"pass": "forward", "warmup_steps": 5, "mean_ms": 10.0}
    times = [clock, clock | {"warmup_steps": 0, "mean_ms": 99.0}, clock | {"context_length": 256}]
    (line,) = beside_wall_clock(pd.DataFrame([profiled, inner]), pd.DataFrame(times)).to_dict("records")
    assert (line["wall_clock_ms"], line["profiled_ms"], line["gpu_busy_ms"]) == (10.0, 30.0, 8.0)
    assert line["idle_percent"] == pytest.approx(20)
