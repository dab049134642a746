"""What the shipped tiles ask of a chip, as rows: compiled for it here, whether it is here or not.

No GPU has a part in this, so the table that notebook 24 shows belongs to no machine. After a change of the
tuning table, `python -m cs336_systems.bench.kernel_resources` writes it again.
"""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from cs336_systems.attention.compile_resources import resources, shipped
from cs336_systems.attention.config import BY_HAND, HOPPERS_OWN, KERNELS
from cs336_systems.measure.rows import load_rows, save_rows
from cs336_systems.names import check_choice

PLACE = {"slug": "flash_forward", "machine": "ahead_of_time", "table": "tiles"}  # of the committed table
CAPABILITIES = (80, 90, 100)
BESIDE = dict(zip(HOPPERS_OWN, ("forward", "dkdv"), strict=True))  # the common kernel that each replaces
ARITHMETIC = {"bfloat16": "half", "tf32": "tf32", "float32": "exact"}  # bfloat16 stands for float16 too


def tile_rows(
    capabilities: Iterable[int],
    *,
    kernels: Iterable[str] = KERNELS,
    dtypes: Iterable[str] = tuple(ARITHMETIC),
    d_heads: Iterable[int] = (64, 128, 256),
) -> list[dict[str, Any]]:
    """Compile every combination, causal, with the tiles of the tuning table, and ask ptxas.

    Where Hopper has a kernel of its own, it comes with the common one: its backward with "dkdv".

    Args:
        capabilities: of ahead_of_time.SHARED_LIMIT: 80 is Ampere, 90 Hopper, 100 Blackwell.

    Returns:
        A row each: registers, spilled_bytes, shared_bytes and shared_limit_bytes. Their GPU is "none".

    Raises:
        ValueError: the name of a kernel or dtype is unknown. RuntimeError: a tile does not compile.
    """
    kernels, dtypes = tuple(kernels), tuple(dtypes)
    for kernel in kernels:
        check_choice("kernel", kernel, KERNELS)
    for dtype in dtypes:
        check_choice("dtype", dtype, ARITHMETIC)
    names = {arithmetic: dtype for dtype, arithmetic in ARITHMETIC.items()}
    capabilities, d_heads = tuple(capabilities), tuple(d_heads)
    arithmetics = [ARITHMETIC[dtype] for dtype in dtypes]
    tables = [resources(capabilities, kernels, arithmetics, d_heads)]
    for (kernel, arithmetic), tiles in BY_HAND.items():
        sizes = [size for size in tiles if size in d_heads]
        if 90 in capabilities and BESIDE[kernel] in kernels and arithmetic in arithmetics and sizes:
            tables.append(resources([90], [kernel], [arithmetic], sizes))
    table = pd.concat(tables)
    table = table.rename(columns={"shared_limit": "shared_limit_bytes"})
    table = table.assign(implementation="flash_triton", gpu="none", dtype=table.pop("arithmetic").map(names))
    return table.to_dict("records")


def shipped_tiles() -> pd.DataFrame:
    """The committed rows of every tile in the tuning table.

    Raises:
        ValueError: the tuning table has changed since.
    """
    table = load_rows(**PLACE)
    places = table.groupby(["kernel", "dtype", "d_head", "capability"])
    stale = [place[0] for place, rows in places if not _as_in_the_table(rows, *place)]
    if stale or table.empty:
        raise ValueError(
            f"the table of tiles is older than the tuning table ({', '.join(stale) or 'there is none'}); "
            f"write it again: python -m {__name__}"
        )
    return table


def _as_in_the_table(rows: pd.DataFrame, kernel: str, dtype: str, d_head: int, capability: int) -> bool:
    if kernel not in (*KERNELS, *HOPPERS_OWN):
        return False
    keys = ["block_m", "block_n", "num_warps", "num_stages", "case"]
    listed = set(rows[keys].fillna({"case": ""}).itertuples(index=False, name=None))
    tiles = shipped(kernel, ARITHMETIC[dtype], d_head, capability)
    return listed == {(*(getattr(tile, key) for key in keys[:-1]), tile.case or "") for tile in tiles}


if __name__ == "__main__":
    rows = tile_rows(CAPABILITIES)
    rows += tile_rows([90], dtypes=["float32"], d_heads=[16, 32])  # which have tiles of their own there
    print(save_rows(rows, **PLACE, replacing={"implementation": "flash_triton"}))
