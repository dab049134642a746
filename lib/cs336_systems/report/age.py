"""Whether rows are of the kernels as they are today."""

import pandas as pd

from cs336_systems.attention.revision import CHANGE, SINCE, is_earlier
from cs336_systems.report.answers import answer
from cs336_systems.report.frames import require_columns


def note_earlier_kernels(*tables: pd.DataFrame) -> None:
    """Tell the reader how many rows of our Triton kernels are of earlier versions; nothing if none is.

    Args:
        tables: rows with the columns implementation and measured_at.
    """
    total = earlier = 0
    for rows in tables:
        require_columns(rows, "implementation", "measured_at")
        ours = rows[rows["implementation"] == "flash_triton"]
        total += len(ours)
        earlier += sum(map(is_earlier, ours["implementation"], ours["measured_at"]))
    if earlier:
        when = f"{SINCE[:10]} {SINCE[11:16]} UTC"
        answer(
            "before you read on",
            f"Of {total:,} rows of ours {earlier:,} were measured with earlier kernels. Since {when} there "
            f"is {CHANGE}. What follows says how fast the kernels were before.",
        )
