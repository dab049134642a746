"""What the handout's protocols compare, cell by cell, and which of it a machine has not measured yet.

    python -m cs336_systems.bench.flash_sweep [leaderboard|models|grid ...]

measures what is missing; its rows are saved as they come, so that an interrupted run continues.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields, replace
from typing import Any

import pandas as pd
import torch

from cs336_systems.arguments import check_choice
from cs336_systems.attention.implementations import ATTENTION, OURS
from cs336_systems.bench.flash_bench import CUDA_GRAPH, LEADERBOARD, PASSES, Cell, time_cell
from labbook import later, runs
from labbook.code import of_module
from labbook.machine import machine_card
from labbook.rows import load_rows, save_rows
from labbook.timing import resolve_device

# Each protocol, and the notebook whose rows it fills.
PROTOCOLS = {"leaderboard": "flash_leaderboard", "models": "flash_leaderboard", "grid": "flash_benchmarking"}
GRID_LENGTHS = tuple(2**power for power in range(7, 17))
GRID_HEADS = (64, 128, 32, 16)  # what is looked at most comes first
GRAPH_LENGTHS = GRID_LENGTHS[:7]  # up to 8,192 tokens the work of launching shows
INTERPRETED_LENGTH = 128  # of a sequence, where Triton's interpreter stands in for a GPU
MODEL_SHAPES = (  # batch, heads, tokens, d_head, causal
    *((1, 16, 16_384, 64, True), (1, 16, 16_384, 128, True), (4, 16, 4096, 128, True)),
    *((2, 16, 8192, 64, False), (2, 16, 8192, 128, False)),
    *((16, 16, 1024, 64, True), (16, 16, 1024, 128, True)),
)
# What is compared by default.
WITH_MANY_HEADS = (OURS, "sdpa_cudnn", "sdpa_flash", "flex", "compiled")
IN_THE_GRID = {
    "bfloat16": (OURS, "sdpa_cudnn", "sdpa_flash", "plain", "torch_softmax", "compiled"),
    "float32": (OURS, "sdpa_efficient", "plain", "torch_softmax", "compiled"),
}
FULL_LENGTH = (OURS, "sdpa_cudnn")  # timed as long as the leaderboard does, the others a tenth of it
_SIZE = ["protocol", "dtype", "batch_size", "num_heads", "context_length", "d_head", "pass"]


def protocol_cells(
    protocol: str, implementations: Iterable[str] = (), device: str | torch.device = "auto"
) -> list[Cell]:
    """All that a protocol compares; without a GPU only what the interpreter can do in reasonable time.

    Raises:
        ValueError: the name of the protocol or of an implementation is unknown; the message lists the names.
    """
    check_choice("protocol", protocol, PROTOCOLS)
    implementations = tuple(implementations)
    for name in implementations:
        check_choice("implementation", name, ATTENTION)
    if protocol == "leaderboard":  # the handout's one size
        task = Cell("", 16_384, 64, num_heads=16, protocol=LEADERBOARD)
        cells = [replace(task, implementation=name) for name in implementations or WITH_MANY_HEADS]
    else:
        cells = (grid_cells if protocol == "grid" else model_cells)(implementations)
    if resolve_device(device).type == "cpu":
        cells = [cell for cell in cells if cell.context_length <= INTERPRETED_LENGTH]
    return cells


def model_cells(implementations: Sequence[str] = ()) -> list[Cell]:
    """Sizes as models have them, 16 heads at once."""
    return [
        Cell(name, length, d_head, batch_size=batch, num_heads=heads, is_causal=is_causal)
        for batch, heads, length, d_head, is_causal in MODEL_SHAPES
        for name in implementations or WITH_MANY_HEADS
    ]


def grid_cells(
    implementations: Sequence[str] = (),
    *,
    context_lengths: Sequence[int] = GRID_LENGTHS,
    d_heads: Sequence[int] = GRID_HEADS,
    dtypes: Sequence[str] = tuple(IN_THE_GRID),
) -> list[Cell]:
    """flash_benchmarking: batch 1, one head, causal; short sequences from a CUDA graph as well."""
    cells = [
        Cell(name, length, d_head, dtype)
        for d_head, dtype, length in itertools.product(d_heads, dtypes, context_lengths)
        for name in implementations or IN_THE_GRID[dtype]
    ]
    short = (cell for cell in cells if cell.context_length in GRAPH_LENGTHS)
    return cells + [replace(cell, protocol=CUDA_GRAPH) for cell in short]


def missing(cells: Iterable[Cell], rows: pd.DataFrame, device: str | torch.device = "auto") -> list[Cell]:
    """The cells, as the device times them, without those on record.

    A cell is on record when every pass of it is, and not as an error.

    Args:
        rows: of flash_times, this machine's, measured with today's code.
    """
    device = resolve_device(device)
    good = rows[rows["status"] != "error"]
    keys = [field.name for field in fields(Cell)]
    known = set(good[[*keys, "pass"]].itertuples(index=False, name=None))
    wanted = dict.fromkeys(cell.on(device) for cell in cells)
    return [cell for cell in wanted if not {(*astuple(cell), p) for p in PASSES[cell.protocol]} <= known]


def time_cells(cells: Iterable[Cell], device: str | torch.device = "auto") -> Iterator[list[dict[str, Any]]]:
    """Time cells one after the other; yields the rows of flash_times of each as they come.

    What torch.compile compiles anew for every size comes last: it takes longer than all the rest.
    """
    device = resolve_device(device)
    cells = dict.fromkeys(cell.on(device) for cell in cells)
    for cell in sorted(cells, key=lambda cell: cell.implementation == "compiled"):
        brief = cell.protocol == LEADERBOARD and cell.implementation not in FULL_LENGTH
        yield time_cell(cell, device=device, durations_ms=(100, 1000) if brief else None)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Median ms per size and implementation, and how many times as long as ours each takes."""
    ms = rows.pivot(index=_SIZE, columns="implementation", values="p50_ms")
    ratio = ms.div(ms.get(OURS, float("nan")), axis="index")
    return pd.concat({"ms": ms.round(3), "times ours": ratio.round(2)}, axis="columns")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the attention kernels against PyTorch's own.")
    parser.add_argument(
        "protocols", nargs="*", choices=[*PROTOCOLS, []], metavar="PROTOCOL", help="default: all"
    )
    parser.add_argument("--implementations", nargs="+", default=[], choices=ATTENTION, metavar="NAME")
    parser.add_argument("--force", action="store_true", help="measure also what is on record")
    options = parser.parse_args(arguments)
    machine, table, now = machine_card().slug, "flash_times", of_module("cs336_systems.bench.flash_sweep")
    for protocol in options.protocols or PROTOCOLS:
        slug, cells = PROTOCOLS[protocol], protocol_cells(protocol, options.implementations)
        run = runs.Run(slug, machine, executed=lambda: now)
        known = runs.of_code(now, load_rows(slug, machine, table), machine)
        left = missing(cells, known[:0] if options.force else known)
        print(f"{protocol}: {len(cells)} cells, {len(left)} of them to measure")
        for rows in time_cells(left):
            save_rows(rows, slug, table, machine, run)
            print("\n".join(later("row_lines")(rows, table)), flush=True)
        if len(known := load_rows(slug, machine, table)):
            print(f"\n{slug}: median ms (times ours)\n{summary(known).to_string()}", flush=True)


if __name__ == "__main__":
    main()
