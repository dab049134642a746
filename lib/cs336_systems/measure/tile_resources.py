"""What the shipped tiles ask of a chip, as rows: compiled for it here, whether it is here or not."""

from collections.abc import Iterable
from typing import Any

from cs336_systems.attention.ahead_of_time import resources
from cs336_systems.attention.tuning import KERNELS, tile_for
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
    table = resources(capabilities, kernels, [ARITHMETIC[dtype] for dtype in dtypes], d_heads)
    table = table.rename(columns={"shared_limit": "shared_limit_bytes"})
    table = table.assign(implementation="flash_triton", dtype=table.pop("arithmetic").map(names))
    return table.drop(columns="maxnreg", errors="ignore").to_dict("records")


def as_in_the_table(row: Any) -> bool:
    """Whether a row is of a tile that the tuning table still has; `row` as a Series or a dict."""
    tile = tile_for(
        row["kernel"], ARITHMETIC[row["dtype"]], int(row["d_head"]), divmod(int(row["capability"]), 10)
    )
    keys = ("block_m", "block_n", "num_warps", "num_stages")
    return all(getattr(tile, key) == row[key] for key in keys)
