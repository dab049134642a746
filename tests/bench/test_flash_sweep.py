"""The protocols of bench: what they compare, what is on record stays, and the table they print."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.attention.revision import SINCE
from cs336_systems.bench import flash_sweep as bench
from cs336_systems.measure.machine import machine_card
from cs336_systems.measure.rows import load_rows, save_rows

TINY = {"context_length": 32, "d_head": 16, "dtype": "float32"}
CELLS = [bench.Cell(name, **TINY) for name in ("reference", "sdpa_cudnn")]


def test_the_grid_is_the_handouts():
    cells = bench.grid_cells()
    ours = [cell for cell in cells if cell.implementation == bench.OURS and cell.case == bench.DO_BENCH]
    assert len(set(ours)) == len(ours) == 10 * 4 * 2
    assert {(cell.batch_size, cell.num_heads) for cell in cells} == {(1, 1)}
    assert {cell.context_length for cell in cells if cell.case == bench.GRAPH} == {128, 256, 512, 1024, 2048}


def test_what_must_be_compiled_for_every_size_comes_last():
    for cells in (bench.grid_cells(), bench.model_cells()):
        last = [cell.implementation == "compiled" for cell in cells]
        assert any(last)
        assert last == sorted(last)


def test_the_leaderboard_is_one_size():
    assert bench.leaderboard_cells(["flex"]) == [
        bench.Cell("flex", 16_384, 64, num_heads=16, case=bench.LEADERBOARD)
    ]


def test_what_is_on_record_is_not_measured_again():
    first = list(bench.measure(CELLS, "resumed"))
    assert [{row["status"] for row in rows} for rows in first] == [{"ok"}, {"skipped"}]
    assert list(bench.measure(CELLS, "resumed")) == []
    assert len(list(bench.measure(CELLS, "resumed", force=True))) == 2


def test_what_earlier_kernels_took_is_measured_again(monkeypatch):
    cells = [replace(CELLS[0], implementation=name) for name in (bench.OURS, "reference")]
    assert len(list(bench.measure(cells, "earlier"))) == 2
    monkeypatch.setitem(SINCE, cells[0].dtype, "2999-01-01T00:00:00Z")
    again = list(bench.measure(cells, "earlier"))
    assert [rows[0]["implementation"] for rows in again] == [bench.OURS]


def test_what_failed_is_measured_again():
    (rows,) = bench.measure(CELLS[:1], "failed")
    failed = {"status": "error", "reason": "out of luck", "p20_ms": None, "p50_ms": None, "p80_ms": None}
    save_rows([{**row, **failed, "mean_ms": None, "std_ms": None} for row in rows], "failed")
    assert len(list(bench.measure(CELLS[:1], "failed"))) == 1


def test_what_contradicts_itself_is_an_error_and_the_rest_goes_on(monkeypatch):
    measure = bench.Cell.measure

    def backwards(cell, device):
        slow = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms", "mean_ms"), 1e6)
        return [row | (slow if row["pass"] == "forward" else {}) for row in measure(cell, device)]

    monkeypatch.setattr(bench.Cell, "measure", backwards)
    (rows,) = bench.measure(CELLS[:1], "contradicting")
    assert {row["status"] for row in rows} == {"error"}
    assert "inside it" in rows[0]["reason"]


def test_the_ratio_is_to_ours_at_the_same_size():
    def row(name, length, ms, status="ok"):
        key = {
            "implementation": name,
            "case": "do_bench",
            "dtype": "float32",
            "batch_size": 1,
            "num_heads": 1,
        }
        return key | {
            "context_length": length,
            "d_head": 16,
            "pass": "forward",
            "p50_ms": ms,
            "status": status,
        }

    rows = [row(bench.OURS, 32, 2.0), row("mine", 32, 3.0), row(bench.OURS, 64, 8.0), row("mine", 64, 4.0)]
    rows += [row(bench.OURS, 128, None, "error"), row("mine", 128, 4.0)]
    table = bench.summary(rows)
    assert list(table["mine"]) == ["3.000 (1.50x)", "4.000 (0.50x)", "4.000"]
    assert list(table[bench.OURS]) == ["2.000", "8.000", "error"]


def test_the_command_saves_rows_and_prints_a_table(monkeypatch, capsys):
    monkeypatch.setitem(bench.PROTOCOLS, "grid", ("flash_benchmarking", lambda names: CELLS[:1]))
    bench.run(["grid"], ["reference"])
    rows = load_rows("flash_benchmarking", machine_card().slug)
    assert set(rows["pass"]) == set(bench.PASSES)
    printed = capsys.readouterr().out
    assert "reference, float32, 1 x 1 x 32 x 16: " in printed
    assert "grid: median ms" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU measures it all")
def test_without_a_gpu_long_sequences_are_left_out(monkeypatch, capsys):
    monkeypatch.setitem(
        bench.PROTOCOLS, "grid", ("short", lambda names: [*CELLS, bench.Cell("reference", 512, 16)])
    )
    bench.run()
    lengths = load_rows("short", machine_card().slug)["context_length"]
    assert set(lengths) == {32}
    assert "tiles: no GPU here" in capsys.readouterr().out


@pytest.mark.parametrize("names", [[], [bench.OURS], ["flex"], ["flex", bench.OURS]])
def test_the_studies_are_of_our_kernels(names, monkeypatch):
    ran = []
    monkeypatch.setattr(bench, "_study", ran.append)
    bench.run(bench.STUDIES, names)
    assert ran == (list(bench.STUDIES) if names != ["flex"] else [])


@pytest.mark.parametrize(("protocols", "names"), [(["speed"], []), ([], ["flashy"])])
def test_unknown_names_are_listed(protocols, names):
    with pytest.raises(ValueError, match=r"allowed: (leaderboard, models, grid|flash_triton, reference)"):
        bench.run(protocols, names)


@pytest.mark.gpu
def test_our_kernels_are_compiled_in_processes_of_their_own():
    cells = [bench.Cell(bench.OURS, 256, d, dtype) for d in (16, 32) for dtype in ("bfloat16", "float32")]
    assert all(row["status"] == "ok" for rows in bench.measure(cells, "together") for row in rows)
