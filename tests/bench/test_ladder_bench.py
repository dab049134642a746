"""The ladder: every rung computes the same thing, and a wrong one gets no time."""

import pytest
import torch

from cs336_systems.attention.techniques import STEPS, all_rungs

pytest.importorskip("triton")
from cs336_systems.bench import ladder_bench as ladder
from cs336_systems.measure.machine import machine_card
from cs336_systems.measure.rows import load_rows, save_rows

TINY = {"num_heads": 2, "context_length": 256, "d_head": 16, "steps": 1}
INTERPRETED = not torch.cuda.is_available()


@pytest.mark.parametrize("kernel", STEPS)
def test_every_rung_is_right(kernel):
    rows = [row for rows in ladder.climb([kernel], **TINY) for row in rows]
    assert len(rows) == len(all_rungs(kernel))
    not_timed = {row["case"]: row["status"] for row in rows if row["status"] != "ok"}
    for_gpus = ["dependent launch", "one kernel, dQ by the copy engine"] if kernel == "backward" else []
    assert not_timed == (dict.fromkeys(for_gpus, "skipped") if INTERPRETED else {})
    assert [row["step"] for row in rows] == list(range(len(rows)))
    save_rows(rows, "flash_leaderboard", table="ladder")
    saved = load_rows("flash_leaderboard", machine_card().slug, table="ladder")
    assert len(saved[saved["kernel"] == kernel]) == len(rows)


def test_a_wrong_rung_is_not_timed(monkeypatch):
    prepare = ladder._prepare
    monkeypatch.setattr(ladder, "_prepare", lambda *arguments: (lambda: None, *prepare(*arguments)[1:]))
    row = ladder.benchmark_rung("forward", "copy engine", **TINY)
    assert row["status"] == "error"
    assert "off by nan" in row["reason"]


def test_an_unknown_rung_is_named():
    with pytest.raises(ValueError, match="forward rung 'faster' is unknown; allowed: first version"):
        ladder.benchmark_rung("forward", "faster", **TINY)


@pytest.mark.gpu
def test_what_is_shipped_is_as_fast_as_the_last_rung():
    size = {"num_heads": 16, "context_length": 8192, "d_head": 64}  # long enough to hide the host's work
    times = {"at most 168 registers": [], "driven by hand": []}
    for _ in range(3):  # in turn, for the clock of a GPU that was busy changes
        for name in times:
            times[name].append(ladder.benchmark_rung("forward", name, **size)["p20_ms"])
    assert min(times["driven by hand"]) < 1.1 * min(times["at most 168 registers"])
