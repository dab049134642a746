"""What the shipped tiles ask of a chip, as rows: compiled for it here, whether it is here or not.

No GPU has a part in this, so the table that notebook 24 shows belongs to no machine. After a change of the
tiles, `python -m cs336_systems.bench.kernel_resources` writes it again.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from cs336_systems.attention.compile_resources import SHARED_LIMIT, compile_tiles, config_for_capability
from cs336_systems.attention.config import HOPPER_KERNELS, KERNELS
from cs336_systems.measure import load_rows, save_rows
from cs336_systems.names import check_choice

PLACE = {"slug": "flash_forward", "machine": "ahead_of_time", "table": "kernel_resources"}
CAPABILITIES = (80, 90, 100)
DTYPES = ("bfloat16", "tf32", "float32")  # bfloat16 stands for float16 too
HEAD_SIZES = (64, 128, 256)
IEEE_HEAD_SIZES = (16, 32)  # which have tiles of their own there


def sweep_resources(
    capabilities: Sequence[int],
    *,
    kernels: Sequence[str] = (*KERNELS, *HOPPER_KERNELS),
    dtypes: Sequence[str] = DTYPES,
    d_heads: Sequence[int] = HEAD_SIZES,
) -> Iterator[list[dict[str, Any]]]:
    """Compile every tile of every combination, causal, and ask ptxas; yields rows of table kernel_resources.

    Args:
        capabilities: of compile_resources.SHARED_LIMIT: 80 is Ampere, 90 Hopper, 100 Blackwell.

    Raises:
        ValueError: a name is unknown. RuntimeError: a tile does not compile.
    """
    for what, given, allowed in (
        ("kernel", kernels, (*KERNELS, *HOPPER_KERNELS)),
        ("dtype", dtypes, DTYPES),
        ("capability", capabilities, SHARED_LIMIT),
    ):
        for value in given:
            check_choice(what, value, allowed)
    for capability in capabilities:
        yield compile_tiles((*place, capability) for place in itertools.product(kernels, dtypes, d_heads))


def shipped_tiles() -> pd.DataFrame:
    """The committed rows of every shipped tile.

    Raises:
        ValueError: the tiles have changed since.
    """
    table = load_rows(**PLACE)
    places = table.groupby(["kernel", "dtype", "d_head", "capability"])
    stale = [place[0] for place, rows in places if not _is_shipped(rows, *place)]
    if stale or table.empty:
        raise ValueError(
            f"the rows are older than the tiles of attention.config ({', '.join(stale) or 'none'}); "
            f"write them again: python -m {__name__}"
        )
    return table


def _is_shipped(rows: pd.DataFrame, kernel: str, dtype: str, d_head: int, capability: int) -> bool:
    tiles = config_for_capability(dtype, d_head, capability).tiles.get(kernel, ())
    if not tiles:
        return False
    recorded = rows.astype(object).where(rows.notna(), None)[[*tiles[0].row()]]
    return set(recorded.itertuples(index=False, name=None)) == {tuple(x.row().values()) for x in tiles}


if __name__ == "__main__":
    for rows in itertools.chain(
        sweep_resources(CAPABILITIES),
        sweep_resources([90], kernels=KERNELS, dtypes=["float32"], d_heads=IEEE_HEAD_SIZES),
    ):
        print(save_rows(rows, **PLACE))
