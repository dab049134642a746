"""Rows: what is saved is what is loaded, what does not fit is refused with a sentence, nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.measure.rows import (
    COLUMNS,
    KEYS,
    RowError,
    load_machines,
    load_rows,
    published,
    save_rows,
)

SLUG, MACHINE = "benchmarking_script", "testbox"


@pytest.fixture(autouse=True)
def figures(tmp_path, monkeypatch):
    monkeypatch.setenv("CS336_FIGURES", str(tmp_path))
    monkeypatch.setenv("CS336_COMMIT", "abc1234")
    return tmp_path


def row(pass_="forward", ms=10.0, **columns):
    times = {"mean_ms": ms, "std_ms": 0.1, "p20_ms": ms - 0.1, "p50_ms": ms, "p80_ms": ms + 0.1, "steps": 5}
    return {"model_size": "tiny", "batch_size": 4, "context_length": 128, "pass": pass_, **times, **columns}


def save(*rows, **options):
    return save_rows(list(rows), SLUG, machine=options.pop("machine", MACHINE), **options)


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_what_is_saved_is_what_is_loaded_with_its_types():
    save(row(ms=12.3456789, is_causal=True, peak_memory_mib=None))
    frame = load_rows(SLUG, MACHINE)
    only = frame.iloc[0]
    assert (only.model_size, only.batch_size, only["pass"], only.status) == ("tiny", 4, "forward", "ok")
    assert only.p50_ms == 12.3457
    assert pd.isna(only.peak_memory_mib)
    assert bool(only.is_causal) is True
    assert {name: str(frame[name].dtype) for name in ("batch_size", "p50_ms", "is_causal", "model_size")} == {
        "batch_size": "Int64",
        "p50_ms": "float64",
        "is_causal": "boolean",
        "model_size": "object",
    }


def test_provenance_is_added():
    save(row())
    only = load_rows(SLUG, MACHINE).iloc[0]
    assert (only.machine, only.commit) == (MACHINE, "abc1234")
    assert all(only[name] for name in ("gpu", "torch", "triton", "measured_at"))


def test_whole_numbers_stay_whole_beside_empty_ones():
    save(row(warmup_steps=5), {"case": "other", "result": -1.5})
    frame = load_rows(SLUG, MACHINE)
    assert frame.warmup_steps.dropna().tolist() == [5]
    assert "5.0" not in (Path(os.environ["CS336_FIGURES"]) / MACHINE / SLUG / "rows.csv").read_text()


def test_a_row_with_the_same_key_is_replaced_and_others_stay():
    save(row(ms=10), row("forward_backward", ms=30))
    save(row(ms=11))
    frame = load_rows(SLUG, MACHINE)
    assert dict(zip(frame["pass"], frame.p50_ms, strict=True)) == {"forward": 11, "forward_backward": 30}


def test_rows_are_ordered_by_key_numbers_by_size_and_passes_by_work():
    rows = [
        row(p, ms, context_length=n)
        for n in (1024, 128, 256)
        for p, ms in (("train_step", 40), ("forward", 10))
    ]
    path = save(*rows)
    frame = load_rows(SLUG, MACHINE)
    assert list(zip(frame.context_length, frame["pass"], strict=True)) == [
        (n, p) for n in (128, 256, 1024) for p in ("forward", "train_step")
    ]
    assert path.read_text().splitlines()[0].split(",") == [c for c in COLUMNS if c in frame.columns]


def test_the_file_does_not_depend_on_the_order_of_saving(figures):
    rows = [row(context_length=n, measured_at="2026-01-01T00:00:00Z") for n in (128, 1024, 256)]
    save(*rows, table="one")
    for each in reversed(rows):
        save(each, table="two")
    folder = figures / MACHINE / SLUG
    assert (folder / "one.csv").read_text() == (folder / "two.csv").read_text()


def test_a_machine_without_rows_gives_an_empty_frame_with_every_column():
    frame = load_rows(SLUG, MACHINE)
    assert len(frame) == 0
    assert list(frame.columns) == list(COLUMNS)


def test_machines_are_joined_and_one_named_twice_counts_once():
    save(row())
    save(row(ms=5), machine="other")
    frame = load_machines(SLUG, [MACHINE, "other", MACHINE, "none_yet"])
    assert sorted(frame.machine) == ["other", MACHINE]
    assert str(frame.batch_size.dtype) == "Int64"
    assert len(load_machines(SLUG, ["none_yet"])) == 0


text = st.text(max_size=20)
values = {str: text, bool: st.booleans(), int: st.integers(0, 2**40), float: st.floats(0, 1e12)}
free_keys = [name for name in KEYS if not COLUMNS[name].allowed]


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from(free_keys), st.none(), min_size=1).flatmap(
        lambda names: st.fixed_dictionaries({name: values[COLUMNS[name].type] for name in names})
    ),
    st.floats(-1e12, 1e12),
    st.integers(0, 10**6),
)
def test_any_keys_and_values_survive_the_file(keys, result, number):
    table = f"t{number}-{time.monotonic_ns()}"
    if not any(str(value).strip() and str(value).isprintable() for value in keys.values()):
        keys["case"] = "x"
    path = save({**keys, "result": result, "reason": 'a,b\n"c"'}, table=table)
    first = path.read_bytes()
    loaded = load_rows(SLUG, MACHINE, table=table)
    assert loaded.result[0] == pytest.approx(result, rel=1e-8, abs=0)
    assert loaded.reason[0] == 'a,b "c"'
    save_rows(loaded, SLUG, machine=MACHINE, table=table)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"mean_s": 1.0}, r"rows\[1\].*'mean_s'.*vocabulary has mean_ms"),
        ({"peak_memory_gb": 1.0}, "'peak_memory_gb'.*peak_memory_mib"),
        ({"contxt_length": 1}, "'contxt_length' is not in the vocabulary; it has context_length"),
        ({"zzz": 1}, "'zzz' is not in the vocabulary; allowed: .*implementation.*commit"),
        (
            {"pass": "inference"},
            "pass is 'inference'; allowed: forward, backward, forward_backward, train_step",
        ),
        ({"dtype": "fp8"}, "dtype is 'fp8'; allowed: float32, tf32, bfloat16, float16"),
        ({"status": "fine"}, "status is 'fine'; allowed: ok, oom, skipped, error"),
        ({"batch_size": 4.5}, "batch_size is 4.5; allowed: a whole number"),
        ({"batch_size": "4"}, "batch_size is '4'; allowed: a whole number"),
        ({"batch_size": True}, "batch_size is True; allowed: a whole number"),
        ({"batch_size": -4}, "batch_size is -4; allowed: 0 or more"),
        ({"is_causal": 1}, "is_causal is 1; allowed: true or false"),
        ({"model_size": 7}, "model_size is 7; allowed: text"),
        ({"mean_ms": -1.0}, "mean_ms is -1.0; allowed: 0 or more"),
        ({"mean_ms": float("inf")}, "mean_ms is inf; allowed: a finite number"),
        ({"mean_ms": [1.0]}, r"mean_ms is \[1.0\]; allowed: a finite number"),
        ({"p50_ms": None}, "p50_ms is empty; allowed: all of p20_ms, p50_ms, p80_ms"),
        ({"p20_ms": 99.0}, "p20_ms, p50_ms, p80_ms are .*; allowed: rising"),
        ({"status": "oom"}, "status is 'oom', but mean_ms is 40"),
        ({"machine": "h100"}, "machine is 'h100'; allowed in this folder: 'testbox'"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_nothing_changes(columns, sentence):
    path = save(row())
    before = path.read_bytes()
    with pytest.raises(RowError, match=sentence):
        save(row("forward_backward", 30), {**row("train_step", 40), **columns})
    assert path.read_bytes() == before


def test_a_status_without_times_needs_none():
    save(
        {"context_length": 128, "status": "oom", "reason": "3 GiB asked"}, {"case": "float16", "result": 9.95}
    )
    assert set(load_rows(SLUG, MACHINE).status) == {"ok", "oom"}


def test_ok_with_nothing_measured_is_refused():
    with pytest.raises(RowError, match=r"nothing was measured"):
        save({"context_length": 128, "steps": 5})


def test_a_row_without_a_key_is_refused():
    with pytest.raises(RowError, match=r"no key column"):
        save({"result": 1.0})


def test_a_duplicate_key_is_refused():
    with pytest.raises(RowError, match=r"rows\[1\]: duplicate key model_size=tiny, batch_size=4"):
        save(row(ms=10), row(ms=11))


def test_a_pass_faster_than_its_part_is_refused_on_saving_and_on_loading():
    path = save(row("forward_backward", 30), row("train_step", 40))
    with pytest.raises(
        RowError, match=r"forward_backward took 30.1 ms .*forward inside it 34.9 ms.*context_length=128"
    ):
        save(row("forward", 35))
    rewrite(path, "39.9,40,40.1", "3.9,4,4.1")
    with pytest.raises(RowError, match=r"train_step took 4.1 ms"):
        load_rows(SLUG, MACHINE)


def test_passes_within_the_spread_or_without_warm_up_or_of_other_keys_are_not_compared():
    save(row("forward_backward", 30), row("train_step", 29.9))
    save(row("forward", 500, warmup_steps=0), row("forward_backward", 30, warmup_steps=0))
    save(row("forward", 500, context_length=1024), row("forward_backward", 30, context_length=256))


def test_of_several_warmups_only_the_longest_must_be_in_order():
    start = [row("forward", 500, warmup_steps=1), row("forward_backward", 30, warmup_steps=1)]
    save(*start, row("forward", 10, warmup_steps=5), row("forward_backward", 30, warmup_steps=5))
    with pytest.raises(RowError, match="forward_backward took"):
        save(row("forward", 500, warmup_steps=5))


def test_a_foreign_machine_is_refused(figures):
    path = save(row())
    (figures / "other" / SLUG).mkdir(parents=True)
    (figures / "other" / SLUG / "rows.csv").write_bytes(path.read_bytes())
    with pytest.raises(RowError, match=r"other/benchmarking_script/rows.csv, line 2: machine is 'testbox'"):
        load_rows(SLUG, "other")


def test_two_gpus_in_one_folder_are_refused():
    save(row(gpu="NVIDIA A100"))
    with pytest.raises(RowError, match=r"NVIDIA A100, NVIDIA B200.*one machine a folder"):
        save(row("train_step", 40, gpu="NVIDIA B200"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:-20], "damaged"),
        (lambda data: data[: data.index(b"tiny") + 4] + b"\n", "line 2 is damaged .*fields"),
        (lambda data: b"\x89PNG\x00\xff\xfe", "damaged"),
        (lambda data: b"", "damaged"),
        (
            lambda data: data.replace(b",128,", b",12x8,"),
            "line 2: context_length is '12x8'; allowed: a whole number",
        ),
        (
            lambda data: data.replace(b",10,", b",1e400,", 1),
            "line 2: mean_ms is '1e400'; allowed: a finite number",
        ),
        (lambda data: data.replace(b"mean_ms", b"mean_s"), "line 1: column 'mean_s'.*mean_ms"),
        (lambda data: data.replace(b"std_ms", b"mean_ms"), "line 1: a column is there twice"),
        (lambda data: data + data.splitlines(keepends=True)[1], "line 3: duplicate key"),
        (lambda data: data.replace(b",ok,", b",,"), "line 2: status is empty"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_never_overwritten(damage, sentence):
    path = save(row())
    path.write_bytes(damage(path.read_bytes()))
    damaged = path.read_bytes()
    for action in (lambda: load_rows(SLUG, MACHINE), lambda: save(row("train_step", 40))):
        with pytest.raises(RowError, match=rf"^{MACHINE}/{SLUG}/rows.csv.*{sentence}"):
            action()
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("name", ["../elsewhere", "", "a/b", ".hidden"])
def test_a_name_that_leaves_the_folder_is_refused(name):
    with pytest.raises(ValueError, match=r"cannot name a file; allowed: letters, digits"):
        save_rows([row()], name, machine=MACHINE)


def test_figures_that_cannot_be_written_to_are_a_clear_error(figures, monkeypatch):
    (figures / "file").write_text("not a folder")
    monkeypatch.setenv("CS336_FIGURES", str(figures / "file"))
    with pytest.raises(PermissionError, match=r"cannot be written to; set CS336_FIGURES"):
        save(row())


def test_published_measurements_are_found_wherever_ours_are_written():
    assert {"gpu", "model_size", "mean_s"} <= set(published("benchmarking_script").columns)
    with pytest.raises(
        ValueError, match=r"'nothing' is unknown; allowed: all_reduce_s, .*torch_compile_model_ms"
    ):
        published("nothing")


SAVE = """
import sys
from cs336_systems.measure.rows import save_rows
first, count = int(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for i in range(first, first + count):
    save_rows([{"context_length": i, "result": i}], "benchmarking_script", machine="testbox")
"""
DIE_BEFORE_THE_FOURTH_FILE_IS_IN_PLACE = """
import itertools, os, signal
calls = itertools.count(1)
os.fsync = lambda file: next(calls) == 4 and os.kill(os.getpid(), signal.SIGKILL)
"""


def start(first: int, count: int, before: str = "") -> subprocess.Popen:
    """A process that is ready to save `count` rows, one by one, when it is told to."""
    command = [sys.executable, "-c", before + SAVE, str(first), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(*processes: subprocess.Popen) -> None:
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def check_nothing_is_lost(at_least: int) -> None:
    saved = list(load_rows(SLUG, MACHINE).context_length)
    assert saved == list(range(len(saved)))
    assert len(saved) >= at_least
    save({"context_length": 10**7, "result": 1.0})
    assert len(load_rows(SLUG, MACHINE)) == len(saved) + 1


def test_a_run_killed_at_any_moment_leaves_a_whole_file_and_a_rerun_goes_on():
    process = start(0, 10**6)
    go(process)
    while len(load_rows(SLUG, MACHINE)) < 3:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    check_nothing_is_lost(at_least=3)


def test_a_run_killed_while_it_writes_leaves_the_file_before():
    process = start(0, 10, before=DIE_BEFORE_THE_FOURTH_FILE_IS_IN_PLACE)
    go(process)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(load_rows(SLUG, MACHINE)) == 3
    check_nothing_is_lost(at_least=3)


def test_two_processes_saving_into_one_file_lose_nothing():
    processes = [start(first, 60) for first in (0, 1000)]
    go(*processes)
    assert [process.communicate() and process.returncode for process in processes] == [0, 0]
    assert len(load_rows(SLUG, MACHINE)) == 120
