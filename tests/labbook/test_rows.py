"""Rows: what is saved is what is loaded, what does not fit is refused with a sentence, nothing is lost."""

import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labbook.files import find
from labbook.project import project, read_yaml
from labbook.rows import RowError, load_rows, point_of, save_rows
from labbook.runs import Run
from labbook.schema import schema

SLUG = "benchmarking_script"
MACHINE = "testbox"
TABLE = "model_times"
RUN = Run(SLUG, MACHINE)

pytestmark = pytest.mark.usefixtures("figures")


def row(pass_="forward", ms=10.0, **columns):
    times = {
        "mean_ms": ms,
        "p20_ms": ms - 0.1,
        "p50_ms": ms,
        "p80_ms": ms + 0.1,
    }
    keys = {"model_size": "tiny", "batch_size": 4, "context_length": 128, "pass": pass_}
    return keys | times | columns


def kernel(name="gemm", ms=1.0, profiler="nsys", **columns):
    row = {"model_size": "tiny", "profiler": profiler, "kernel": name, "total_ms": ms}
    return row | columns


def save(*rows, table=TABLE, machine=MACHINE):
    save_rows(rows, SLUG, table, machine, RUN)
    return find(machine, SLUG, f"{table}.csv")


def load(table=TABLE, machine=MACHINE):
    return load_rows(SLUG, machine, table)


# What is saved is what is loaded.


def test_columns_have_plain_dtypes():
    save(row(ms=12.3456789, warmup_steps=5), row("train_step", 40))
    frame = load()
    assert frame.p50_ms[0] == 12.3457
    assert (frame.batch_size.dtype, frame.warmup_steps.dtype) == ("int64", "float64")
    assert (frame.warmup_steps[0], frame.reason[0]) == (5, None)
    cold = {"model_size": "tiny", "step_index": 0, "step_ms": 1.0}
    save(cold | {"synchronized": True}, cold, table="cold_steps")
    assert load("cold_steps").synchronized.tolist() == [None, True]


def test_rows_are_sorted_numbers_by_size_and_passes_by_work():
    assert load().empty
    assert list(load().columns) == list(schema().tables[TABLE].types) + ["machine"]
    passes = ("train_step", "forward")
    path = save(*(row(pass_, context_length=n) for n in (1024, 128, 256) for pass_ in passes))
    expected = [(n, pass_) for n in (128, 256, 1024) for pass_ in ("forward", "train_step")]
    for frame in (load(), pd.read_csv(path)):
        assert list(zip(frame["context_length"], frame["pass"], strict=True)) == expected


VALUES = {"text": st.text(max_size=20), "bool": st.booleans(), "int": st.integers(0, 2**40)}
VALUES |= dict.fromkeys(("float", "exact"), st.floats(0, 1e12))


@settings(max_examples=40)
@given(st.sampled_from(sorted(schema().tables)), st.data())
def test_any_row_of_any_table_survives_the_file(table, data):
    columns = schema().tables[table].keys | schema().tables[table].values
    record = {"status": "oom"}
    for name, kind in columns.items():
        if not name.endswith(("_ms", "_s")):
            value = (
                st.sampled_from(schema().allowed[name])
                if name in schema().allowed
                else VALUES[kind]
            )
            record[name] = data.draw(st.none() | value, label=name)
    machine = f"box-{time.monotonic_ns()}"
    path = save(record, table=table, machine=machine)
    first = path.read_bytes()
    loaded = load(table, machine)
    for name, given_value in record.items():
        kept = loaded[name][0]
        if isinstance(given_value, float):
            assert kept == pytest.approx(given_value, rel=1e-5)
        elif isinstance(given_value, str):
            assert (kept or "") == " ".join(given_value.split())
        else:
            assert pd.isna(kept) if given_value is None else kept == given_value
    (again,) = loaded.to_dict("records")
    assert point_of(again, table) == point_of(record, table)
    save(again, table=table, machine=machine)
    assert path.read_bytes() == first


# What replaces what.


def test_a_row_replaces_the_one_with_its_key_and_others_stay():
    path = save(row(ms=10), row(ms=20, batch_size=None), row("forward_backward", ms=30))
    path.write_text(path.read_text().replace(",128,", ",128.0,"))  # as a person may
    save(row(ms=11))
    save(row(ms=21, batch_size=None))
    assert load().p50_ms.tolist() == [21, 11, 30], "an empty key is a key"


def test_a_new_recording_replaces_the_whole_of_the_old_one_and_no_other():
    save(kernel("gemm"), kernel("softmax"), table="kernels")
    save(kernel("gemm", profiler="torch cpu"), table="kernels")
    save(kernel("fused", 2), table="kernels")
    frame = load("kernels")
    assert set(zip(frame.profiler, frame.kernel, strict=True)) == {
        ("nsys", "fused"),
        ("torch cpu", "gemm"),
    }
    save({"model_size": "tiny", "profiler": "nsys", "status": "oom"}, table="kernels")
    assert load("kernels").status.tolist() == ["oom", "ok"]


def test_the_committed_rows_load_and_are_sorted():
    places = [project().figures / folder for folder in project().committed]
    tables = [path for place in places for path in place.glob("*/*.csv")]
    assert len(tables) >= 30
    for path in tables:
        machine, slug = path.parts[-3:-1]
        keys = list(schema().tables[path.stem].keys)
        written = pd.read_csv(path)[keys].astype(object).fillna("")
        assert load_rows(slug, machine, path.stem)[keys].astype(object).fillna("").equals(written)


def test_rows_from_before_a_column_was_there_load_and_are_replaced():
    path = save(row(warmup_steps=1), row(warmup_steps=2))
    pd.read_csv(path).drop(columns=["run", "compile_s"]).to_csv(path, index=False)
    assert load()[["compile_s", "run"]].isna().all(axis=None)
    save(row(warmup_steps=2, compile_s=2.0))
    assert load().compile_s.fillna(0).tolist() == [0, 2.0]


def test_every_column_is_described():
    columns = {name for table in schema().tables.values() for name in table.types}
    assert columns <= read_yaml(project().notebooks / "tables.yaml")["columns"].keys()


# What does not fit.


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"mean_s": 1.0}, r"rows\[1\].*mean_s.*mean_ms"),
        ({"pass": "inference"}, "inference.*forward, backward, forward_backward, train_step"),
        ({"batch_size": 4.5}, "batch_size is 4.5.*whole"),
        ({"status": "out of memory"}, "out of memory.*oom"),
        ({"p20_ms": 50.0}, r"\[0, 50.0, 40.0, 40.1\].*none falls"),
        ({"status": "oom"}, "mean_ms is 40.*'oom': no time"),
        ({"pass": "forward_backward"}, "duplicate key model_size=tiny, batch_size=4"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_nothing_changes(columns, told):
    path = save(row())
    before = path.read_bytes()
    with pytest.raises(RowError, match=f"{MACHINE}/{SLUG}/{TABLE}.csv.*{told}"):
        save(row("forward_backward", 30), row("train_step", 40) | columns)
    assert path.read_bytes() == before


def test_empty_columns_of_other_tables_may_be_given():
    save(row(power_w=None, saved_for_backward_mib=float("nan")))
    assert "power_w" not in load().columns


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: b"\x89PNG\xff\xfe\n" + data, "damaged"),
        (lambda data: data[: len(data) * 3 // 4], "line 2"),
        (lambda data: data.replace(b",128,", b",12x8,"), "line 2: context_length is '12x8'"),
        (lambda data: data.replace(b"mean_ms", b"mean_s"), "line 1.*mean_s.*mean_ms"),
    ],
)
def test_a_damaged_file_is_refused_by_file_and_line_and_left_as_it_is(damage, told):
    path = save(row())
    path.write_bytes(damaged := damage(path.read_bytes()))
    with pytest.raises(RowError, match=rf"^{MACHINE}/{SLUG}/{TABLE}.csv.*{told}") as error:
        load()
    assert "\n" not in str(error.value)
    with pytest.raises(RowError):
        save(row())
    assert path.read_bytes() == damaged


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match="unknown table 'model_tims'; allowed: "):
        save(row(), table="model_tims")


# Nothing is lost.

SAVE = f"""
import sys
from labbook.rows import save_rows
from labbook.runs import Run
first, count, rows = map(int, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
for i in range(first, first + count):
    row = {{"model_size": str(i), "profiler": "nsys", "total_ms": i}}
    rows_of = [row | {{"kernel": "k" * 90 + str(k)}} for k in range(rows)]
    save_rows(rows_of, "{SLUG}", "kernels", "{MACHINE}", Run("{SLUG}", "{MACHINE}"))
    print(i, flush=True)
"""
DIE_IN_THE_EIGHTH_WRITE = """
import itertools, os, signal
calls = itertools.count(1)
os.fsync = lambda file: next(calls) == 8 and os.kill(os.getpid(), signal.SIGKILL)
"""


def start(first, count, rows, before=""):
    """A process that is ready to save `count` recordings of as many rows, when it is told to."""
    command = [sys.executable, "-c", before + SAVE, str(first), str(count), str(rows)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(*processes):
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def test_of_a_run_killed_while_it_writes_nothing_half_written_is_read():
    rows = 3
    # Each save writes the run, then rows.
    process = start(0, 10, rows, before=DIE_IN_THE_EIGHTH_WRITE)
    go(process)
    reported = process.communicate()[0].split()
    assert (process.returncode, reported) == (-signal.SIGKILL, ["0", "1", "2"])
    saved = load("kernels").model_size.value_counts()
    assert saved.to_dict() == dict.fromkeys(reported, rows)
    save(kernel(), table="kernels")
    assert len(load("kernels")) == len(saved) * rows + 1, "the next one can be saved"


def test_two_processes_saving_into_one_file_lose_nothing():
    processes = [start(first, 25, 2) for first in (0, 1000)]
    go(*processes)
    assert [process.communicate() and process.returncode for process in processes] == [0, 0]
    assert len(load("kernels")) == 100
