"""The protocols: what they compare, what is left to measure, and the table of results."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from cs336_systems.bench.flash_bench import CUDA_GRAPH, DO_BENCH, LEADERBOARD, Cell
from cs336_systems.bench.flash_sweep import (
    OURS,
    missing,
    protocol_cells,
    summary,
    time_cells,
)

TINY = Cell("plain", 32, 16, "float32")
CELLS = [TINY, replace(TINY, implementation="sdpa_cudnn")]


def test_the_interpreter_is_not_asked_for_long_sequences():
    lengths = {cell.context_length for cell in protocol_cells("grid", device="cpu")}
    assert lengths == {128}
    assert protocol_cells("leaderboard", device="cpu") == []


@pytest.mark.parametrize(("protocol", "implementations"), [("speed", []), ("grid", ["flashy"])])
def test_unknown_names_are_refused(protocol, implementations):
    with pytest.raises(ValueError, match=r"speed|flashy"):
        protocol_cells(protocol, implementations)


@pytest.fixture(scope="module")
def on_record():
    rows = [row for rows in time_cells(CELLS, "cpu") for row in rows]
    return pd.DataFrame(rows).assign(kernels=None)


def test_what_is_on_record_is_not_measured_again(on_record):
    assert set(on_record["status"]) == {"ok", "skipped"}
    assert missing(CELLS, on_record, "cpu") == []
    assert missing(CELLS, on_record.head(0), "cpu") == [cell.on(torch.device("cpu")) for cell in CELLS]


def test_another_size_or_a_missing_pass_or_an_error_is_measured(on_record):
    assert len(missing([*CELLS, replace(TINY, is_causal=False)], on_record, "cpu")) == 1
    assert len(missing(CELLS, on_record[on_record["pass"] != "backward"], "cpu")) == 2
    failed = on_record.assign(status=on_record["status"].replace("ok", "error"))
    assert [cell.implementation for cell in missing(CELLS, failed, "cpu")] == ["plain"]


def test_without_a_gpu_launches_and_graphs_are_one_cell(on_record):
    wanted = [TINY, replace(TINY, protocol=CUDA_GRAPH), replace(TINY, protocol=LEADERBOARD)]
    protocols = [cell.protocol for cell in missing(wanted, on_record.head(0), "cpu")]
    assert protocols == ["wall_clock", "leaderboard"]


def test_the_ratio_is_to_ours_at_the_same_size():
    size = {"protocol": DO_BENCH, "dtype": "float32", "batch_size": 1, "num_heads": 1, "d_head": 16}
    times = {(OURS, 32): 2.0, ("plain", 32): 3.0, (OURS, 64): 8.0, ("plain", 64): 4.0, (OURS, 128): None}
    rows = [
        size | {"implementation": name, "context_length": n, "pass": "forward", "p50_ms": ms}
        for (name, n), ms in times.items()
    ]
    table = summary(pd.DataFrame(rows))
    assert table["ms"][OURS].tolist()[:2] == [2, 8]
    assert table["times ours"]["plain"].tolist()[:2] == [1.5, 0.5]
    assert "plain" in summary(pd.DataFrame(rows[1:2]))["ms"], "ours need not be there"
