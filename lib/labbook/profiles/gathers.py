"""When a sharded model's weights were gathered in a profiled step, and when they could have been used."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from labbook.profiles.table import MS, STEP, Profile, one_step

_ALL_GATHER = r"(?i)^(?:nccl|gloo:).*all_?gather"


def gather_times(
    profile: Profile, units: Mapping[str, Iterable[str]], could_begin: Callable
) -> pd.DataFrame:
    """Of each unit's gather in the last recorded step: pass, unit, calls, start_ms, end_ms, needed_ms.

    profile: with the ranges "needs <unit>", where the host came to a unit, and "backward".
    units: of the passes "forward" and "backward", in the order in which they are gathered.
    could_begin: of kernels in the order of their launch, (launches, ends, mark) -> when that could begin what
        the host came to at the mark.
    Times are since the step began. Raises ValueError: there are other all-gathers than those of the units.
    """
    ranges, kernels, _ = one_step(profile)
    kernels = kernels.sort_values("launch_ns")
    is_message = kernels["class"] == "communication"
    computed = _of_busiest_stream(kernels[~is_message])
    gathers = kernels[is_message & kernels.name.str.contains(_ALL_GATHER)]
    marks = ranges.set_index("name").start_ns.sort_values()
    backward_ns = marks.loc[["backward"]].min()
    rows = []
    for pass_, names in units.items():
        # Of backward what begins with it or after, of forward all else: both are true, or neither.
        is_backward = pass_ == "backward"
        messages = gathers[(gathers.launch_ns >= backward_ns) == is_backward]
        pass_marks = marks[(marks >= backward_ns) == is_backward]
        messages = messages.assign(unit=units_of(len(messages), list(names)))
        for name, calls in messages.groupby("unit", sort=False):
            needed_ns = could_begin(
                computed.launch_ns, computed.end_ns, pass_marks[f"needs {name}"]
            )
            rows.append(
                {
                    "pass": pass_,
                    "unit": name,
                    "calls": len(calls),
                    "start_ms": calls.start_ms.min(),
                    "end_ms": calls.end_ms.max(),
                    "needed_ms": (needed_ns - marks[STEP]) * MS,
                }
            )
    return pd.DataFrame(rows)


def units_of(messages: int, units: Sequence[str]) -> list[str]:
    """The unit of each all-gather of a pass; each has one, or equally many if it is a block.

    Raises ValueError: that does not come out even.
    """
    is_block = np.array([unit.startswith("layers.") for unit in units])
    per_block, remainder = divmod(messages - sum(~is_block), max(sum(is_block), 1))
    if remainder or per_block < 1:
        raise ValueError(f"{messages} all-gathers are not those of {', '.join(units)}")
    return np.repeat(units, np.where(is_block, per_block, 1)).tolist()


def _of_busiest_stream(kernels):
    # Copies have streams of their own, and what is launched there says nothing of what is computed.
    busy = (kernels.end_ns - kernels.start_ns).groupby(kernels.stream).sum()
    return kernels[kernels.stream == busy.idxmax()]
