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
        processes = [(ranges, kernels)] + list(others.values())
        for process, (ranges, kernels) in enumerate(processes):
            for name, start, end in ranges:
                events.append(("range", name, process, start, end, None, 0))
            for number, (name, launch, start, end, *stream) in enumerate(kernels):
                events.append(("call", "cudaLaunch", process, launch, launch + 1, number, 0))
                stream = stream[0] if stream else 7
                events.append(("kernel", name, process, start, end, number, stream))
        events = pd.DataFrame(events, columns=COLUMNS)
        events["correlation"] = events["correlation"].astype(float)
        events["thread"] = 1
        return Profile(events)

    return build
