"""What the shipped tiles ask of a chip, as rows: compiled for it here, whether it is here or not."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from cs336_systems.attention.ahead_of_time import HOPPER_DKDV, resources
from cs336_systems.attention.tuning import BY_HAND, KERNELS, tile_by_hand, tile_for
from cs336_systems.measure.host import check_choice

ARITHMETIC = {"bfloat16": "half", "tf32": "tf32", "float32": "exact"}  # bfloat16 stands for float16 too


def tile_rows(
    capabilities: Iterable[int],
    *,
    kernels: Iterable[str] = KERNELS,
    dtypes: Iterable[str] = tuple(ARITHMETIC),
    d_heads: Iterable[int] = (64, 128, 256),
) -> list[dict[str, Any]]:
    """Compile every combination, causal, with the tile of the tuning table, and ask ptxas.

    Where Hopper has a dkdv kernel of its own, it comes beside the common one.

    Args:
        capabilities: of ahead_of_time.SHARED_LIMIT: 80 is Ampere, 90 Hopper, 100 Blackwell.

    Returns:
        A row each: registers, spilled_bytes, shared_bytes and shared_limit_bytes.

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
    for arithmetic, d_head in BY_HAND:
        if 90 in capabilities and "dkdv" in kernels and arithmetic in arithmetics and d_head in d_heads:
            tables.append(resources([90], [HOPPER_DKDV], [arithmetic], [d_head]))
    table = pd.concat(tables)
    table = table.rename(columns={"shared_limit": "shared_limit_bytes"})
    table = table.assign(implementation="flash_triton", dtype=table.pop("arithmetic").map(names))
    return table.drop(columns="maxnreg", errors="ignore").to_dict("records")


def as_in_the_table(row: Any) -> bool:
    """Whether a row is of a tile that the tuning table still has; `row` as a Series or a dict."""
    place = ARITHMETIC[row["dtype"]], int(row["d_head"]), divmod(int(row["capability"]), 10)
    tile = tile_by_hand(*place) if row["kernel"] == HOPPER_DKDV else tile_for(row["kernel"], *place)
    keys = ("block_m", "block_n", "num_warps", "num_stages")
    return tile is not None and all(getattr(tile, key) == row[key] for key in keys)
