"""What notebook 26 compares, cell by cell."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from cs336_systems.attention.implementations import OURS
from cs336_systems.bench.flash_bench import CUDA_GRAPH, Cell, time_cell
from labbook.timing import resolve_device

GRID_LENGTHS = tuple(2**power for power in range(7, 17))
GRID_HEADS = (64, 128, 32, 16)  # what is looked at most comes first
GRAPH_LENGTHS = GRID_LENGTHS[:7]  # up to 8,192 tokens the work of launching shows
# What is compared by default.
IN_THE_GRID = {
    "bfloat16": (OURS, "sdpa_cudnn", "sdpa_flash", "plain", "torch_softmax", "compiled"),
    "float32": (OURS, "sdpa_efficient", "plain", "torch_softmax", "compiled"),
}


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


def time_cells(cells: Iterable[Cell], device: str | torch.device = "auto") -> Iterator[list[dict[str, Any]]]:
    """Time cells one after the other; yields the rows of flash_times of each as they come.

    What torch.compile compiles anew for every size comes last: it takes longer than all the rest.
    """
    device = resolve_device(device)
    cells = dict.fromkeys(cell.on(device) for cell in cells)
    for cell in sorted(cells, key=lambda cell: cell.implementation == "compiled"):
        yield time_cell(cell, device=device)
