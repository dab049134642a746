import pandas as pd
import pytest

from labbook.profiles import Profile

COLUMNS = ["kind", "name", "process", "start_ns", "end_ns", "correlation", "stream"]


@pytest.fixture(scope="session")
def a_profile():
    """Builds a profile of ranges (name, start, end) and kernels (name, launch, start, end); by their process.

    A fifth number of a kernel is its stream; else it is 7.
    """

    def build(ranges, kernels, **others) -> Profile:
        events = []
        for process, (opened, launched) in enumerate([(ranges, kernels), *others.values()]):
            events += [("range", name, process, *times, None, 0) for name, *times in opened]
            for number, (name, launch, start, end, *stream) in enumerate(launched):
                events.append(("call", "cudaLaunchKernel", process, launch, launch + 1, number, 0))
                events.append(("kernel", name, process, start, end, number, *(stream or [7])))
        return Profile(
            pd.DataFrame(events, columns=COLUMNS).astype({"correlation": float}).assign(thread=1)
        )

    return build
