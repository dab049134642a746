import pandas as pd
import pytest

from cs336_systems.measure import rows as measured_rows
from cs336_systems.report.compare import (
    longest_warmup,
    published_rows,
    side_by_side,
    times_in,
    with_model,
    with_reference,
    with_wrapper,
)
from cs336_systems.report.plots import sweep
from cs336_systems.report.style import COLORS
from cs336_systems.report.tables import pivot


@pytest.fixture
def loaded(monkeypatch):
    """Rows of the machines named here, instead of files."""
    frames = {}

    def load_rows(slug, machine):
        return frames.get(machine, pd.DataFrame(columns=["machine", "context_length", "p50_ms"]))

    monkeypatch.setattr(measured_rows, "load_rows", load_rows)
    return frames


def of(machine):
    row = {"machine": machine, "context_length": 128, "p50_ms": 1.0, "status": "ok"}
    return pd.DataFrame([row])


def test_rows_say_where_they_come_from(loaded):
    loaded.update(h200=of("h200"), cpu=of("cpu"))
    frame = side_by_side("slug", "cpu")
    assert frame["where"].tolist() == ["reference: H200", "this machine: cpu"]


def test_the_reference_itself_appears_once(loaded):
    loaded.update(h200=of("h200"))
    assert side_by_side("slug", "h200")["where"].tolist() == ["reference: H200"]


def test_of_the_reference_only_what_this_machine_has_too(loaded):
    loaded.update(h200=pd.concat([of("h200"), of("h200").assign(context_length=256)]), cpu=of("cpu"))
    frame = side_by_side("slug", "cpu", sharing=["context_length"])
    assert frame["context_length"].tolist() == [128, 128]
    assert frame["machine"].tolist() == ["h200", "cpu"]
    assert len(side_by_side("slug", "h200", sharing=["context_length"])) == 2
    assert side_by_side("slug", "nobody", sharing=["context_length"]).empty


def test_the_reference_stands_beside_what_it_measured_too(loaded):
    theirs = [
        of("h200").assign(warmup_steps=steps, p50_ms=ms, d_head=None) for steps, ms in ((1, 9.0), (5, 2.0))
    ]
    mine = [of("cpu").assign(warmup_steps=3, context_length=length) for length in (128, 256)]
    loaded.update(h200=pd.concat(theirs, ignore_index=True), cpu=pd.concat(mine, ignore_index=True))
    frame = with_reference("slug", "cpu")
    assert times_in(frame) == ["p50_ms", "reference_ms"]
    assert frame["reference_ms"].fillna(0).tolist() == [2.0, 0.0]


def test_each_has_a_status_of_its_own(loaded):
    theirs = [
        of("h200").assign(d_head=d, p50_ms=ms, status=s) for d, ms, s in ((1, None, "oom"), (2, 3.0, "ok"))
    ]
    mine = [
        of("cpu").assign(d_head=d, p50_ms=ms, status=s) for d, ms, s in ((1, 4.0, "ok"), (3, None, "skipped"))
    ]
    loaded.update(h200=pd.concat(theirs, ignore_index=True), cpu=pd.concat(mine, ignore_index=True))
    frame = with_reference("slug", "cpu")
    table = pivot(frame, "d_head", "context_length", times_in(frame))
    assert table.to_numpy().tolist() == [["4.00", "OOM"], ["skipped", "–"]]


def test_without_a_partner_nothing_stands_beside(loaded):
    loaded.update(h200=of("h200").assign(context_length=512), cpu=of("cpu"), gpu=of("gpu").assign(d_head=64))
    for machine in ("cpu", "gpu", "h200", "nobody"):
        assert times_in(with_reference("slug", machine)) == ["p50_ms"]


def test_of_several_warmups_the_longest_is_shown():
    frame = pd.DataFrame({"pass": ["forward", "forward", "backward"], "d_head": [16, 16, None]})
    frame = frame.assign(warmup_steps=[5, 2, 2], p50_ms=[1.0, 2.0, 3.0])
    assert longest_warmup(frame)["p50_ms"].tolist() == [1.0, 3.0]
    assert len(longest_warmup(pd.concat([frame.assign(machine=name) for name in ("h200", "cpu")]))) == 4
    assert longest_warmup(frame[:0]).empty


def test_nothing_measured_is_an_empty_frame_that_can_be_drawn(loaded):
    frame = side_by_side("slug", "cpu")
    assert frame.empty
    sweep(frame, "context_length")


def test_published_rows_say_where_they_come_from():
    assert set(published_rows("benchmarking_script")["where"]) == {"published: RTX 5090, rtx5090-report"}


def test_seconds_become_milliseconds():
    frame = published_rows("benchmarking_script")
    assert "mean_s" not in frame
    assert frame["mean_ms"].max() > 100


def test_passes_become_rows_and_modes_implementations():
    frame = published_rows("torch_compile_model_ms")
    assert set(frame["pass"]) == {"forward", "train_step"}
    assert set(frame["implementation"]) == {"eager", "compiled"}
    assert set(frame["dtype"]) == {"float32", "tf32"}
    assert frame["mean_ms"].notna().all()


def test_medians_and_means_are_kept_apart():
    frame = published_rows("mixed_precision_ms")
    assert (frame["p50_ms"].isna() != frame["mean_ms"].isna()).all()


@pytest.mark.parametrize(
    "name", ["pytorch_attention", "all_reduce_s", "mixed_precision_accumulation", "memory_profiling_gb"]
)
def test_every_table_says_where_it_is_from(name):
    assert published_rows(name)["where"].str.startswith("published").all()


def test_with_model_tells_the_two_xl_apart():
    frame = pd.DataFrame({"model_size": ["xl", "xl"], "edition": [2025, 2026]})
    assert list(with_model(frame)["model"]) == ["xl (2025)", "xl (2026)"]


def test_with_wrapper_puts_names_in_words():
    frame = pd.DataFrame({"implementation": ["single", "naive", "torch"]})
    assert list(with_wrapper(frame)["wrapper"]) == ["one process", "naive", "PyTorch's DDP"]
    assert set(with_wrapper(frame)["wrapper"]) <= set(COLORS["wrapper"])
