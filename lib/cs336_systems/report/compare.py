"""Rows of several machines under each other, each labelled with where it comes from (column `where`)."""

import pandas as pd

from cs336_systems.configs import model_size
from cs336_systems.measure import rows
from cs336_systems.report.words import value_label

_PASS_COLUMNS = {"forward_ms": "forward", "backward_ms": "backward", "train_step_ms": "train_step"}
_MODES = {"compiled_tf32": ("compiled", "tf32")}
_WRAPPERS = {"single": "one process", "torch": "PyTorch's DDP"}


def side_by_side(
    slug: str,
    machine: str,
    reference: str = "h200",
    *,
    published: pd.DataFrame | None = None,
    table: str = "rows",
) -> pd.DataFrame:
    """The reference's rows, this machine's and published ones, with a column `where` that plots understand.

    Args:
        slug: the notebook's slug.
        machine: slug of this machine; where it is the reference, its rows appear once.
        published: from `published_rows`, filtered as needed.

    Returns:
        One frame; empty where nothing has been measured.
    """
    places = {f"reference: {value_label(reference)}": reference}
    if machine != reference:
        places[f"this machine: {machine}"] = machine
    frames = [rows.load_rows(slug, name, table=table).assign(where=where) for where, name in places.items()]
    if published is not None:
        frames.append(published)
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else frames[0]


def longest_warmup(frame: pd.DataFrame) -> pd.DataFrame:
    """Of rows that differ in their warm-up alone the one with the longest: they are one point of a plot."""
    keys = [name for name in rows.KEYS if name in frame and name != "warmup_steps"]
    return frame.sort_values("warmup_steps", kind="stable").drop_duplicates(keys, keep="last").sort_index()


def published_rows(name: str) -> pd.DataFrame:
    """A published table in the words of the rows: milliseconds, a row for each pass, `where` it is from.

    A time called a median is `p50_ms`, any other `mean_ms`; a mode is float32 unless it says TF32.

    Raises:
        ValueError: there is no such table; the message lists those there are.
    """
    frame = rows.published(name)
    passes = [column for column in _PASS_COLUMNS if column in frame]
    if passes:
        keys = [column for column in frame if column not in passes]
        frame = frame.melt(keys, passes, var_name="pass", value_name="mean_ms").dropna(subset="mean_ms")
        frame["pass"] = frame["pass"].map(_PASS_COLUMNS)
    for seconds in [column for column in frame if column.endswith("_s")]:
        frame[f"{seconds[:-2]}_ms"] = frame.pop(seconds) * 1e3
    if "ms" in frame:
        median = frame.pop("statistic") == "median"
        times = frame.pop("ms")
        frame = frame.assign(p50_ms=times.where(median), mean_ms=times.where(~median))
    if "mode" in frame:
        modes = [_MODES.get(mode, (mode, "float32")) for mode in frame.pop("mode")]
        frame["implementation"], frame["dtype"] = zip(*modes, strict=True)
    told = [frame[column] for column in ("gpu", "source") if column in frame]
    where = ["published: " + ", ".join(names) for names in zip(*told, strict=True)]
    return frame.assign(where=where or "published").reset_index(drop=True)


def with_model(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `model`: size and edition in one label, for "xl" is another model in each."""
    keys = zip(frame["model_size"], frame["edition"], strict=True)
    return frame.assign(model=[model_size(*key).label for key in keys])


def with_wrapper(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of data-parallel training with a column `wrapper`: who averages the gradients, in words."""
    return frame.assign(wrapper=frame["implementation"].replace(_WRAPPERS))
