"""One kernel table, whatever saw the kernels: Nsight Systems, torch.profiler on CUDA, or on a CPU.

A kernel belongs to the ranges that are open when it is *launched*, on any thread of its process. Not on its
own thread alone: autograd launches the kernels of backward from a thread that never opened a range. And not
when the kernel runs: by then the host is often several ranges ahead.
"""

import re
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import pandas as pd

from labbook.profiles.names import kernel_class, short_name

MS = 1e-6  # nanoseconds to milliseconds
STEP = "measure"  # the range of one measured step


class ProfileError(ValueError):
    """A profile cannot answer; the sentence says why, and what to do."""


@dataclass
class Profile:
    """What a profiler recorded; times in nanoseconds on one clock.

    Inside a range called optimizer, elementwise work, reductions and copies are of the class "optimizer":
    written in plain PyTorch it launches the same kernels as everybody, and only the range tells them apart.

    Attributes:
        ranges: process, thread, name, start_ns, end_ns; one row each time that a range was open. Added is
            `range`, the path of those open then: measure/forward.
        kernels: name (full), kind ("kernel", "memcpy", "memset", "graph"; on a CPU "operator"), process,
            thread, launch_ns, start_ns, end_ns, stream; one row a launch. Added are `range` (of those open at
            launch), `kernel` (short name) and `class`.
        calls: of the CUDA API: process, thread, name, start_ns, end_ns.
    """

    ranges: pd.DataFrame
    kernels: pd.DataFrame
    calls: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __post_init__(self) -> None:
        if self.kernels.empty or self.kernels.kind.isin(("memcpy", "memset")).all():
            raise ProfileError("the profile has no kernel in it; did the program compute inside the capture?")
        if self.ranges.empty:
            told = "run the code under nvtx.recording(), and nsys with --trace=cuda,nvtx"
            raise ProfileError(f"the profile has no ranges in it; {told}")
        for what, frame in vars(self).items():
            if len(frame) and (count := frame.name.isna().sum()):
                raise ProfileError(f"{count} of {len(frame)} {what} have no name; export the profile again")
        paths, of_ranges = range_paths(self.ranges, self.kernels)
        self.ranges = self.ranges.assign(range=of_ranges)
        kernels = self.kernels.assign(range=paths, kernel=self.kernels.name.map(short_name))
        classes = kernels.name.map(kernel_class)
        ordinary = classes.isin(["elementwise", "reduction", "copy/cast"])
        classes = classes.mask(ordinary & paths.str.contains(r"(?:^|/)optimizer\b"), "optimizer")
        self.kernels = kernels.assign(**{"class": classes})


def launched(ran: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """What ran on a GPU, with `launch_ns` and `thread` of the call of the CUDA API that launched it.

    That is the call of its process that carries its `correlation`; of several, one inside the other or long
    after, the last that began before it.
    """
    by, types = ["process", "correlation"], {"start_ns": "int64", "process": "int64", "correlation": float}
    calls = calls.assign(launch_ns=calls.start_ns.astype("Int64"), thread=calls.thread.astype(object))
    calls = calls.dropna(subset="correlation")[["start_ns", *by, "launch_ns", "thread"]]
    ran, calls = (each.astype(types).sort_values("start_ns", kind="stable") for each in (ran, calls))
    found = pd.merge_asof(ran, calls, on="start_ns", by=by)
    return found.assign(launch_ns=found.launch_ns.fillna(found.start_ns).astype("int64"))


def kernel_table(profile: Profile, root: str = STEP) -> pd.DataFrame:
    """The kernels of one step: range, kernel, class, stream, kind, calls, total_ms; the longest first.

    A step is one time that the range `root` is open; calls and total_ms are means over the steps, of which
    `table.attrs["steps"]` tells how many. What ran outside `root`, the warm-up, is left out. Ranges start at
    `root`.

    Raises:
        ProfileError: no range of that name was recorded; the message lists those that were.
    """
    steps, _, kernels = _inside(profile, root)
    kernels = kernels.assign(total_ms=(kernels.end_ns - kernels.start_ns) * MS)
    grouped = kernels.groupby(["range", "kernel", "class", "stream", "kind"])["total_ms"]
    table = grouped.agg(calls="size", total_ms="sum") / len(steps)
    table = table.reset_index().sort_values("total_ms", ascending=False, ignore_index=True)
    table.attrs["steps"] = len(steps)
    return table


def range_table(profile: Profile, root: str = STEP) -> pd.DataFrame:
    """Host and device time of `root` and of the ranges directly inside it, as means over the steps.

    Returns:
        range; host_ms, how long the range was open; device_span_ms, from its first kernel's start to its last
        one's end; device_busy_ms, the part of it with a kernel running; calls (launches); device_idle_share
        of the span. A range whose device is mostly idle is bound by the host that launches.
    """
    _, ranges, kernels = _inside(profile, root)
    records = []
    for opened in ranges[ranges.range.str.count("/") <= 1].itertuples():
        own = _since(kernels[kernels.process == opened.process], opened, "launch_ns")
        busy, host_ms = covered(own), (opened.end_ns - opened.start_ns) * MS
        span_ms, busy_ms = busy.end_ms.max() - busy.start_ms.min(), (busy.end_ms - busy.start_ms).sum()
        records.append((opened.range, host_ms, span_ms, busy_ms, len(own)))
    columns = ["range", "host_ms", "device_span_ms", "device_busy_ms", "calls"]
    table = pd.DataFrame(records, columns=columns).fillna({"device_span_ms": 0})
    table = table.groupby("range", sort=False).mean().reset_index()
    span_ms = table.device_span_ms.where(table.calls > 0)
    return table.assign(device_idle_share=1 - table.device_busy_ms / span_ms)


def range_paths(ranges: pd.DataFrame, launches: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Path of the ranges open at each launch, on any thread of its process, and of each range itself.

    Args:
        ranges: process, name, start_ns, end_ns.
        launches: process, launch_ns.
    """
    launch_paths, paths = {}, {}
    for process, mine in ranges[ranges.end_ns > ranges.start_ns].groupby("process"):
        launched = launches[launches.process == process]
        # At equal times: a range that ends, then those that begin, the longest first, then launches.
        events = [(end, 0, 0, index) for index, end in mine.end_ns.items()]
        events += zip(mine.start_ns, repeat(1), -mine.end_ns, mine.index)
        events += [(launch, 2, 0, index) for index, launch in launched.launch_ns.items()]
        names, is_open = mine.name.to_dict(), {}
        for _, what, _, index in sorted(events):
            if what == 0:
                del is_open[index]
            elif what == 1:
                is_open[index] = names[index]
                paths[index] = "/".join(is_open.values())
            else:
                launch_paths[index] = "/".join(is_open.values())
    return (
        pd.Series(launch_paths, dtype=object).reindex(launches.index, fill_value=""),
        pd.Series(paths, dtype=object).reindex(ranges.index),
    )


def covered(spans: pd.DataFrame, gap_ms: float = 0.0) -> pd.DataFrame:
    """The union of spans that may overlap, gaps of at most `gap_ms` closed: start_ms and end_ms, rising."""
    spans = spans.sort_values("start_ms")
    begins = spans.start_ms > spans.end_ms.cummax().shift() + gap_ms
    return spans.groupby(begins.cumsum().to_numpy()).agg({"start_ms": "min", "end_ms": "max"})


def stages(table: pd.DataFrame) -> pd.Series:
    """The part of each row's range right after the root: forward, backward, optimizer; or the root itself."""
    parts = table.range.str.split("/")
    return parts.str[1].fillna(parts.str[0])


def one_step(profile: Profile) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The ranges and the kernels of the last step, for a timeline; milliseconds since it began.

    Returns:
        ranges: name, depth (0 for the step itself), start_ms, end_ms;
        kernels: range (path at launch, from the step on), kernel, class, stream, start_ms, end_ms.
    """
    steps, ranges, kernels = _inside(profile, STEP)
    ranges = _since(ranges.assign(depth=ranges.range.str.count("/")), steps.iloc[-1])
    kernels = _since(kernels, steps.iloc[-1], "launch_ns")
    columns = ["range", "kernel", "class", "stream", "start_ms", "end_ms"]
    return ranges[["name", "depth", "start_ms", "end_ms"]], kernels[columns]


def step_calls(profile: Profile) -> pd.DataFrame:
    """The calls of the CUDA API in the last step: name, start_ms, end_ms, since it began as in `one_step`."""
    steps, _, _ = _inside(profile, STEP)
    calls = profile.calls.reindex(columns=["name", "start_ns", "end_ns"])
    return _since(calls, steps.iloc[-1])[["name", "start_ms", "end_ms"]]


def kernel_rows(table: pd.DataFrame, smallest_share: float = 2e-3) -> list[dict[str, Any]]:
    """A `kernel_table` as rows: layers summed (layers.*), and kernels that hardly count as "rest".

    Below `smallest_share` of the step's time a kernel does not get its name; each class in each range keeps a
    rest of its own, so all sums stay. What has its name, has all its calls.
    """
    table = table.assign(range=table.range.str.replace(r"\.\d+", ".*", regex=True))
    of_kernel = table.groupby(["kernel", "class"]).total_ms.transform("sum")
    small = of_kernel < smallest_share * table.total_ms.sum()
    table["kernel"] = table.kernel.mask(small, "rest")
    rows = table.groupby(["range", "kernel", "class"])[["calls", "total_ms"]].sum().reset_index()
    return rows.to_dict("records")


def _inside(profile: Profile, root: str) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Each time that `root` is open; the ranges and the kernels inside it, `range` their path from it on."""
    steps = profile.ranges[profile.ranges.name == root]
    if steps.empty:
        names = sorted(set(profile.ranges.name))
        raise ProfileError(f"the profile has no range {root!r}; it has {', '.join(names[:20])}")
    below = rf"(?:^|/)({re.escape(root)}(?:/.*)?)$"
    ranges, kernels = (
        frame.assign(range=frame.range.str.extract(below)[0]).dropna(subset="range")
        for frame in (profile.ranges, profile.kernels)
    )
    return steps, ranges, kernels


def _since(frame: pd.DataFrame, step: Any, time: str = "start_ns") -> pd.DataFrame:
    """The rows whose `time` lies in a step, with start_ms and end_ms since it began."""
    frame = frame[(frame[time] >= step.start_ns) & (frame[time] < step.end_ns)]
    times = {f"{end}_ms": (frame[f"{end}_ns"] - step.start_ns) * MS for end in ("start", "end")}
    return frame.assign(**times).reset_index(drop=True)
