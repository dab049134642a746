"""Whether rows are of the kernels as they are today."""

import pandas as pd

from cs336_systems.attention.revision import CHANGE, SINCE, is_earlier
from cs336_systems.report.answers import answer
from cs336_systems.report.frames import require_columns


def count_earlier(rows: pd.DataFrame) -> int:
    """How many rows are of earlier versions of our Triton kernels.

    Args:
        rows: with the columns implementation, dtype and measured_at.
    """
    require_columns(rows, "implementation", "dtype", "measured_at")
    return sum(map(is_earlier, rows["implementation"], rows["dtype"], rows["measured_at"]))


def note_earlier_kernels(*tables: pd.DataFrame) -> None:
    """Tell the reader how many rows of our Triton kernels are of earlier versions; nothing if none is.

    Args:
        tables: rows with the columns implementation, dtype and measured_at.
    """
    if earlier := sum(map(count_earlier, tables)):
        total = sum((rows["implementation"] == "flash_triton").sum() for rows in tables)
        last = max(SINCE.values())
        when = f"{last[:10]} {last[11:16]} UTC"
        answer(
            "before you read on",
            f"Of {total:,} rows of ours {earlier:,} were measured with earlier kernels. Since {when} there "
            f"is {CHANGE}. What follows says how fast the kernels were before.",
        )
