"""What the shipped tiles ask of a chip, as rows: compiled for it here, whether it is here or not.

No GPU has a part in this, so the table that notebook 24 shows belongs to no machine. After a change of the
tiles, `python -m cs336_systems.bench.kernel_resources` writes it again.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from cs336_systems.arguments import check_choice
from cs336_systems.attention.compile_resources import SHARED_LIMIT, compile_tiles, config_for_capability
from cs336_systems.attention.config import BF16X3_KERNELS, GLUON_KERNELS, HOPPER_KERNELS, KERNELS
from labbook.code import of_module
from labbook.rows import load_rows, save_rows
from labbook.runs import Run

PLACE = {"slug": "flash_forward", "machine": "ahead_of_time", "table": "kernel_resources"}
CAPABILITIES = (80, 90, 100)
DTYPES = ("bfloat16", "tf32", "float32")  # bfloat16 stands for float16 too
HEAD_SIZES = (64, 128, 256)
SMALL_HEAD_SIZES = (16, 32)  # which have tiles of their own in float32, and in HOPPER_KERNELS


def sweep_resources(
    capabilities: Sequence[int],
    *,
    kernels: Sequence[str] = (*KERNELS, *HOPPER_KERNELS),
    dtypes: Sequence[str] = DTYPES,
    d_heads: Sequence[int] = HEAD_SIZES,
) -> Iterator[list[dict[str, Any]]]:
    """Compile every tile of every combination, and ask ptxas; yields rows of table kernel_resources.

    Args:
        capabilities: of compile_resources.SHARED_LIMIT: 80 is Ampere, 90 Hopper, 100 Blackwell.

    Raises:
        ValueError: a name is unknown. RuntimeError: a tile does not compile.
    """
    allowed = {"kernel": (*KERNELS, *HOPPER_KERNELS), "dtype": DTYPES, "capability": SHARED_LIMIT}
    for what, given in zip(allowed, (kernels, dtypes, capabilities), strict=True):
        for value in given:
            check_choice(what, value, allowed[what])
    for capability in capabilities:
        yield compile_tiles((*place, capability) for place in itertools.product(kernels, dtypes, d_heads))


def shipped_tiles() -> pd.DataFrame:
    """The committed rows of every shipped tile.

    Raises:
        ValueError: the tiles have changed since.
    """
    table = load_rows(**PLACE)
    for (kernel, dtype, *sizes), rows in table.groupby(["kernel", "dtype", "d_head", "capability"]):
        tiles = [tile.row() for tile in config_for_capability(dtype, *map(int, sizes)).all_tiles(kernel)]
        recorded = rows.astype(object).where(rows.notna(), None)[[*tiles[0]] if tiles else ["kernel"]]
        if set(recorded.itertuples(index=False, name=None)) != {tuple(tile.values()) for tile in tiles}:
            raise ValueError(f"rows of {kernel} are of older tiles; write them anew: python -m {__name__}")
    return table


if __name__ == "__main__":
    run = Run(
        PLACE["slug"], PLACE["machine"], executed=lambda: of_module("cs336_systems.bench.kernel_resources")
    )
    for rows in itertools.chain(
        sweep_resources(CAPABILITIES),
        sweep_resources(
            [90], kernels=(*KERNELS, *BF16X3_KERNELS), dtypes=["float32"], d_heads=SMALL_HEAD_SIZES
        ),
        sweep_resources([90], kernels=GLUON_KERNELS, dtypes=["bfloat16"], d_heads=SMALL_HEAD_SIZES),
    ):
        print(save_rows(rows, **PLACE, run=run))
