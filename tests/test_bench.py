"""The benchmark of attention kernels: rows that say what was measured, and no time for what is wrong."""

import pytest
import torch

from cs336_systems import bench
from cs336_systems.attention.reference import reference_attention
from cs336_systems.measure.machine import machine_card
from cs336_systems.measure.rows import load_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = {"context_length": 32, "d_head": 16, "dtype": "float32"}


def test_a_row_a_pass():
    rows = bench.benchmark_cell("mine", reference_attention, **TINY)
    assert [row["pass"] for row in rows] == list(bench.PASSES)
    assert all(row["status"] == "ok" and row["p50_ms"] > 0 for row in rows)
    assert rows[0]["num_heads"] == 1
    assert rows[0]["d_head"] == 16


def test_what_is_wrong_is_not_timed():
    rows = bench.benchmark_cell("mine", lambda q, k, v, is_causal: reference_attention(q, k, v), **TINY)
    assert [row["status"] for row in rows] == ["error"] * 3
    assert "O of case 'whole tiles' is off by" in rows[0]["reason"]
    assert rows[0]["p50_ms"] is None
    ours = bench.benchmark_cell(bench.OURS, reference_attention, **TINY)
    table = bench.summary(rows + ours)
    assert (table["mine"] == "error").all()
    assert "x" not in "".join(table[bench.OURS])


def test_16_bit_implementations_are_skipped_in_float32():
    rows = bench.benchmark_cell("sdpa_cudnn", bench.IMPLEMENTATIONS["sdpa_cudnn"], **TINY)
    assert [row["status"] for row in rows] == ["skipped"] * 3


def test_the_ratio_is_to_ours_at_the_same_size():
    def row(name, length, ms):
        key = {
            "implementation": name,
            "case": "do_bench",
            "dtype": "float32",
            "batch_size": 1,
            "num_heads": 1,
        }
        return key | {"context_length": length, "d_head": 16, "pass": "forward", "p50_ms": ms, "status": "ok"}

    rows = [row(bench.OURS, 32, 2.0), row("mine", 32, 3.0), row(bench.OURS, 64, 8.0), row("mine", 64, 4.0)]
    table = bench.summary(rows)
    assert list(table["mine"]) == ["3.000 (1.50x)", "4.000 (0.50x)"]
    assert list(table[bench.OURS]) == ["2.000", "8.000"]


def test_leaderboard_protocol():
    row = bench.benchmark_leaderboard(
        "mine", reference_attention, num_heads=2, context_length=32, d_head=16, warmup_ms=1, repeat_ms=1
    )
    assert row["status"] == "ok"
    assert row["case"] == "leaderboard protocol"


def test_rows_are_saved_as_they_come(monkeypatch, capsys):
    monkeypatch.setattr(bench, "GRID_LENGTHS", (32,))
    monkeypatch.setattr(
        bench,
        "benchmark_grid",
        lambda names: (bench.benchmark_cell(n, reference_attention, **TINY) for n in names),
    )
    bench.run(["grid"], ["reference"])
    rows = load_rows("flash_benchmarking", machine_card().slug)
    assert set(rows["pass"]) == set(bench.PASSES)
    assert "grid: median ms" in capsys.readouterr().out


@pytest.mark.parametrize(("protocols", "names"), [(["speed"], []), ([], ["flashy"])])
def test_unknown_names_are_listed(protocols, names):
    with pytest.raises(ValueError, match=r"allowed: (leaderboard, models, grid|flash_triton, reference)"):
        bench.run(protocols, names)
