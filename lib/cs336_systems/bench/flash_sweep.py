"""The attention kernels against their peers, in the handout's two protocols; or your own kernel.

    python -m cs336_systems bench                                          all that this machine can run
    python -m cs336_systems bench leaderboard --implementations flash_triton sdpa_cudnn

    from cs336_systems.bench.flash_sweep import benchmark_cell
    benchmark_cell("mine", MyFlashAttention.apply, context_length=4096, d_head=64)

Rows are saved as they come, and what a machine has on record is not measured again: an interrupted run
continues. Rows of earlier kernels of ours do not count. What is wrong is not timed and gets no ratio. The two
studies of our own kernels take a minute and always run whole: what they compare is of one run.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pandas as pd
import torch

from cs336_systems.attention import HAS_TRITON
from cs336_systems.attention.revision import is_earlier
from cs336_systems.bench.eligibility import IMPLEMENTATIONS, OURS, check_ours, remember
from cs336_systems.bench.flash_bench import (
    DO_BENCH,
    GRAPH,
    LEADERBOARD,
    PASSES,
    benchmark_cell,
    benchmark_leaderboard,
    case_name,
)
from cs336_systems.measure.host import check_choice
from cs336_systems.measure.machine import machine_card
from cs336_systems.measure.rows import KEYS, RowError, load_rows, save_rows
from cs336_systems.measure.subprocesses import in_processes
from cs336_systems.measure.timing import resolve_device

__all__ = ["IMPLEMENTATIONS", "OURS", "PASSES", "benchmark_cell", "benchmark_leaderboard", "run", "summary"]

GRID_LENGTHS = tuple(2**power for power in range(7, 17))
GRID_HEADS = (64, 128, 32, 16)  # what is looked at most comes first
GRAPH_LENGTHS = GRID_LENGTHS[:5]  # up to 2,048 tokens the work of launching shows
INTERPRETED_LENGTH = 128  # of a sequence, where Triton's interpreter stands in for a GPU
MODEL_SHAPES = ((1, 16, 16_384, 64), (1, 16, 16_384, 128), (4, 16, 4096, 128))  # batch, heads, tokens, d_head
HALF_PEERS = ("sdpa_cudnn", "sdpa_flash")
DEFAULTS = {  # what each protocol compares, by dtype
    "leaderboard": {"bfloat16": (OURS, *HALF_PEERS, "flex", "compiled")},
    "models": {"bfloat16": (OURS, *HALF_PEERS, "flex", "compiled")},
    "grid": {
        "bfloat16": (OURS, *HALF_PEERS, "reference", "compiled"),
        "float32": (OURS, "sdpa_efficient", "reference", "compiled"),
    },
}
FULL_LENGTH = (OURS, "sdpa_cudnn")  # timed as long as the leaderboard does, the others a tenth of it


@dataclass(frozen=True)
class Cell:
    """One implementation at one size, timed in one way."""

    implementation: str
    context_length: int
    d_head: int
    dtype: str = "bfloat16"
    batch_size: int = 1
    num_heads: int = 1
    case: str = DO_BENCH

    def measure(self, device: torch.device) -> list[dict[str, Any]]:
        """Its rows: one a pass."""
        function = IMPLEMENTATIONS[self.implementation]
        if self.case == LEADERBOARD:
            options = {} if self.implementation in FULL_LENGTH else {"warmup_ms": 100, "repeat_ms": 1000}
            size = {"num_heads": self.num_heads, "context_length": self.context_length, "d_head": self.d_head}
            return [benchmark_leaderboard(self.implementation, function, **size, **options, device=device)]
        size = asdict(self) | {"device": device, "graph": self.case == GRAPH}
        del size["implementation"], size["case"]
        passes = PASSES[2:] if self.case == GRAPH else PASSES
        return benchmark_cell(self.implementation, function, passes=passes, **size)


def leaderboard_cells(names: Iterable[str] = ()) -> list[Cell]:
    """flash_leaderboard: the handout's one size."""
    names = list(names) or DEFAULTS["leaderboard"]["bfloat16"]
    return [Cell(name, 16_384, 64, num_heads=16, case=LEADERBOARD) for name in names]


def model_cells(names: Iterable[str] = ()) -> list[Cell]:
    """Sizes as models have them, 16 heads at once."""
    names = list(names) or DEFAULTS["models"]["bfloat16"]
    cells = [
        Cell(name, length, d_head, "bfloat16", batch, heads)
        for batch, heads, length, d_head in MODEL_SHAPES
        for name in names
    ]
    return sorted(cells, key=_compiled_last)


def grid_cells(
    names: Iterable[str] = (),
    *,
    context_lengths: Iterable[int] = GRID_LENGTHS,
    d_heads: Iterable[int] = GRID_HEADS,
    dtypes: Iterable[str] = ("bfloat16", "float32"),
) -> list[Cell]:
    """flash_benchmarking: batch 1, one head, causal; short sequences from a CUDA graph as well."""
    cells = [
        Cell(name, length, d_head, dtype)
        for d_head in d_heads
        for dtype in dtypes
        for length in context_lengths
        for name in list(names) or DEFAULTS["grid"][dtype]
    ]
    short = [cell for cell in cells if cell.context_length in GRAPH_LENGTHS]
    graphs = [replace(cell, case=GRAPH) for cell in short if cell.implementation != "compiled"]
    return sorted(cells + graphs, key=_compiled_last)


def _compiled_last(cell: Cell) -> bool:
    return cell.implementation == "compiled"


# What they compare and where its rows go; the studies look at our own kernels only.
PROTOCOLS: dict[str, tuple[str, Callable[..., list[Cell]]]] = {
    "leaderboard": ("flash_leaderboard", leaderboard_cells),
    "models": ("flash_leaderboard", model_cells),
    "grid": ("flash_benchmarking", grid_cells),
}


def tile_study(**options: Any) -> Iterator[list[dict[str, Any]]]:
    """`measure.tiles.sweep_tiles`; nothing where there is no Triton."""
    if not HAS_TRITON:
        return iter(())
    from cs336_systems.bench.tile_bench import sweep_tiles

    return sweep_tiles(**options)


def ladder_study(**options: Any) -> Iterator[list[dict[str, Any]]]:
    """`measure.ladder.climb`; nothing where there is no Triton."""
    if not HAS_TRITON:
        return iter(())
    from cs336_systems.bench.ladder_bench import climb

    return climb(**options)


STUDIES: dict[str, tuple[str, Callable[[], Iterator[list[dict[str, Any]]]]]] = {
    "tiles": ("flash_benchmarking", tile_study),
    "ladder": ("flash_leaderboard", ladder_study),
}


def measure(
    cells: Iterable[Cell], slug: str, *, device: str | torch.device = "auto", force: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Measure cells one after the other and save the rows of each; those on record are left out.

    Args:
        slug: the folder of the rows.
        force: measure also what is on record.
    """
    device = resolve_device(device)
    machine = machine_card(device).slug
    known = set() if force else _on_record(slug, machine)
    cells = [replace(cell, case=_case_here(cell, device)) for cell in cells]
    cells = [cell for cell in dict.fromkeys(cells) if cell not in known]
    if device.type == "cuda":
        _compile_ours(cells, device)
    for cell in cells:
        rows = cell.measure(device)
        try:
            save_rows(rows, slug, machine=machine)
        except RowError as error:  # a pass faster than one inside it: something else had the machine
            rows = [_failed(row, str(error)) for row in rows]
            save_rows(rows, slug, machine=machine)
        yield rows


def _failed(row: dict[str, Any], reason: str) -> dict[str, Any]:
    """The row without its times; it will be measured again."""
    key = {name: value for name, value in row.items() if name in KEYS}
    return key | {"status": "error", "reason": reason}


def _case_here(cell: Cell, device: torch.device) -> str:
    return cell.case if cell.case == LEADERBOARD else case_name(device, cell.case == GRAPH)


def _on_record(slug: str, machine: str) -> set[Cell]:
    """Cells that the machine has rows of, but for those that failed and those of earlier kernels of ours."""
    rows = load_rows(slug, machine).to_dict("records")
    earlier = [is_earlier(row["implementation"], row["dtype"], row["measured_at"]) for row in rows]
    return {
        _cell_of(row) for row, old in zip(rows, earlier, strict=True) if row["status"] != "error" and not old
    }


def _cell_of(row: dict[str, Any]) -> Cell:
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})


def _compile_ours(cells: Iterable[Cell], device: torch.device) -> None:
    """Check our kernels for every dtype and head size at once, in several processes.

    What Triton compiles there is on disk for this process, which else would spend minutes on it.
    """
    wanted = sorted({(cell.dtype, cell.d_head) for cell in cells if cell.implementation == OURS})
    if len(wanted) < 2:
        return
    verdicts = in_processes(check_ours, [(*key, str(device)) for key in wanted], most=8)
    for key, verdict in zip(wanted, verdicts, strict=True):
        if verdict is not None:
            remember(*key, device, verdict)


def summary(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Median ms per size and implementation, and how many times as long as ours each takes."""
    frame = pd.DataFrame(rows)
    size = ["case", "dtype", "batch_size", "num_heads", "context_length", "d_head", "pass"]
    frame["time"] = frame.p50_ms.map("{:.3f}".format).where(frame.status == "ok", frame.status)
    ours = frame[(frame.implementation == OURS) & (frame.status == "ok")].set_index(size).p50_ms
    base = frame.set_index(size).index.map(ours.to_dict())
    ratio = pd.Series(frame.p50_ms.to_numpy() / pd.Series(base, dtype=float).to_numpy())
    others = (frame.status == "ok") & (frame.implementation != OURS) & ratio.notna()
    frame["time"] += ratio.map(" ({:.2f}x)".format).where(others, "")
    order = list(dict.fromkeys(frame.implementation))
    return frame.pivot(index=size, columns="implementation", values="time")[order].fillna("")


def run(protocols: Iterable[str] = (), names: Iterable[str] = (), *, force: bool = False) -> None:
    """Measure what is not on record, save every row as it comes, print a table a protocol.

    Without a GPU only what the interpreter can do in reasonable time is measured.

    Args:
        protocols: names in PROTOCOLS or STUDIES; none means all.
        names: of implementations; none means those that a protocol compares. The studies are of ours alone.
        force: measure again what is on record.

    Raises:
        ValueError: the name of a protocol or of an implementation is unknown; the message lists the names.
    """
    known = (*PROTOCOLS, *STUDIES)
    names, protocols = list(names), list(protocols) or known
    for protocol in protocols:
        check_choice("protocol", protocol, known)
    for name in names:
        check_choice("implementation", name, IMPLEMENTATIONS)
    for protocol in protocols:
        if protocol in PROTOCOLS:
            _compare(protocol, names, force)
        elif OURS in (names or [OURS]):
            _study(protocol)


def _compare(protocol: str, names: list[str], force: bool) -> None:
    device = resolve_device("auto")
    slug, cells_of = PROTOCOLS[protocol]
    cells = cells_of(names)
    if device.type == "cpu":
        cells = [cell for cell in cells if cell.context_length <= INTERPRETED_LENGTH]
        print(f"{protocol}: no GPU here, so nothing longer than {INTERPRETED_LENGTH} tokens is measured")
    for rows in measure(cells, slug, force=force):
        print(_line(rows), flush=True)
    here = {replace(cell, case=_case_here(cell, device)) for cell in cells}
    rows = load_rows(slug, machine_card().slug).to_dict("records")
    if shown := [row for row in rows if _cell_of(row) in here]:
        print(f"\n{protocol}: median ms (times ours)\n{summary(shown).to_string()}", flush=True)


def _study(protocol: str) -> None:
    if resolve_device("auto").type == "cpu":
        print(f"{protocol}: no GPU here, so nothing is measured")
        return
    slug, study = STUDIES[protocol]
    for rows in study():
        save_rows(rows, slug, table=protocol)
        for row in rows:
            keys = ("kernel", "case", "block_m", "block_n", "num_warps", "num_stages")
            what = ", ".join(str(row[key]) for key in keys if row.get(key) is not None)
            print(f"{what}: {row['p50_ms'] or row['reason']}", flush=True)


def _line(rows: list[dict[str, Any]]) -> str:
    cell = "{case}, {implementation}, {dtype}, {batch_size} x {num_heads} x {context_length} x {d_head}"
    times = [f"{row['p50_ms']:.3f}" if row["status"] == "ok" else row["status"] for row in rows]
    return f"{cell.format_map(rows[0])}: {' / '.join(times)} {rows[0]['reason']}".rstrip()
