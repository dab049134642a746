"""What notebooks 26 and 27 compare, cell by cell."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from cs336_systems.attention.implementations import OURS
from cs336_systems.bench.flash_bench import CUDA_GRAPH, LEADERBOARD, Cell, time_cell
from labbook.timing import resolve_device

GRID_LENGTHS = tuple(2**power for power in range(7, 17))
GRID_HEADS = (64, 128, 32, 16)  # what is looked at most comes first
GRAPH_LENGTHS = GRID_LENGTHS[:7]  # up to 8,192 tokens the work of launching shows
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


def time_cells(cells: Iterable[Cell], device: str | torch.device = "auto") -> Iterator[list[dict[str, Any]]]:
    """Time cells one after the other; yields the rows of flash_times of each as they come.

    What torch.compile compiles anew for every size comes last: it takes longer than all the rest.
    """
    device = resolve_device(device)
    cells = dict.fromkeys(cell.on(device) for cell in cells)
    for cell in sorted(cells, key=lambda cell: cell.implementation == "compiled"):
        brief = cell.protocol == LEADERBOARD and cell.implementation not in FULL_LENGTH
        yield time_cell(cell, device=device, durations_ms=(100, 1000) if brief else None)
