"""Rows of collectives and of data-parallel training, labelled and chosen."""

from typing import Any

import pandas as pd

from cs336_systems.accounting.collective_costs import fit_collective  # noqa: F401
from cs336_systems.configs import model_size
from labbook.labels import value_label


def with_model(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `model`: size and edition in one label, for "xl" is another model in each."""
    keys = zip(frame["model_size"], frame["edition"], strict=True)
    return frame.assign(model=[model_size(*key).label for key in keys])


def with_wrapper(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of data-parallel training with a column `wrapper`: by its label."""
    return frame.assign(wrapper=frame["implementation"].map(value_label))


def of_run(rows: pd.DataFrame, **chosen: Any) -> pd.DataFrame:
    """The rows of one run of a notebook, with `wrapper`: each column has a value that was asked for.

    An empty cell passes: wrappers without buckets have no bucket size.
    """
    for name, values in chosen.items():
        rows = rows[rows[name].isna() | rows[name].isin(values if isinstance(values, list) else [values])]
    return with_wrapper(rows)
