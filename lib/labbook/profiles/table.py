"""One kernel table, whatever saw the kernels: Nsight Systems, torch.profiler on CUDA, or on a CPU.

A kernel belongs to the ranges that are open when it is *launched*, on any thread of its process. Not on its
own thread alone: autograd launches the kernels of backward from a thread that never opened a range. And not
when the kernel runs: by then the host is often several ranges ahead.
"""

import re
from collections import defaultdict
from typing import Any

import pandas as pd

from labbook.profiles.names import kernel_class, short_name

MS = 1e-6  # nanoseconds to milliseconds
STEP = "measure"  # the range of one measured step
_HOST = ("range", "call")  # kinds of events; of any other kind is what ran


class ProfileError(ValueError):
    """A profile cannot answer; the sentence says why, and what to do."""


class Profile:
    """What a profiler recorded; times in nanoseconds on one clock.

    Inside a range called optimizer, elementwise work, reductions and copies are of the class "optimizer":
    written in plain PyTorch it launches the same kernels as everybody, and only the range tells them apart.

    ranges: process, thread, name, start_ns, end_ns, one row each time that a range was open; and `range`,
        the path of those open then: measure/forward.
    calls: of the CUDA API: process, thread, name, start_ns, end_ns.
    kernels: name (full), kind, process, stream, start_ns, end_ns, one row each; launch_ns and thread of
        the launch; `range` (path of those open at launch), `kernel` (short name) and `class`.
    """

    def __init__(self, events: pd.DataFrame) -> None:
        """From `complete` events; raises ProfileError where there are no kernels or no ranges among them."""
        self.ranges, self.calls = (
            events[events.kind == kind].reset_index(drop=True) for kind in _HOST
        )
        ran = events[~events.kind.isin(_HOST)]
        if ran.kind.isin(["memcpy", "memset"]).all():
            raise ProfileError(
                "the profile has no kernel in it; did the program compute inside the capture?"
            )
        if self.ranges.empty:
            told = "run the code under nvtx.recording(), and nsys with --trace=cuda,nvtx"
            raise ProfileError(f"the profile has no ranges in it; {told}")
        # Its launch is the call of its process that carries its correlation; of several, one inside the other
        # or long after, the last that began before it. An operator of a CPU launches itself.
        by, launches = ["process", "correlation"], self.calls.dropna(subset="correlation")
        launches = launches.assign(launch_ns=launches.start_ns.astype("Int64"))
        launches = launches[["start_ns", *by, "launch_ns", "thread"]].sort_values(
            "start_ns", kind="stable"
        )
        ran = ran.drop(columns="thread").sort_values("start_ns", kind="stable")
        ran = pd.merge_asof(ran, launches, on="start_ns", by=by)
        ran["launch_ns"] = ran.launch_ns.fillna(ran.start_ns).astype("int64")
        self.ranges["range"], ran["range"] = range_paths(self.ranges, ran)
        classes = ran.name.map(kernel_class)
        ordinary = classes.isin(["elementwise", "reduction", "copy/cast"])
        ran["class"] = classes.mask(
            ordinary & ran.range.str.contains(r"(?:^|/)optimizer\b"), "optimizer"
        )
        self.kernels = ran.assign(kernel=ran.name.map(short_name))


def complete(events: pd.DataFrame, source: str) -> pd.DataFrame:
    """Events as a `Profile` takes them; raises ProfileError if some lack what all of their kind must have.

    events: kind ("range", "call" of the CUDA API; what ran: "kernel", "memcpy", "memset", "graph", on a
        CPU "operator"), name, process, thread, stream, correlation, start_ns, end_ns.
    source: their file, for the message.
    """
    lacking = events[["name", "process", "thread", "start_ns", "end_ns"]].isna()
    lacking["stream"] = events.stream.isna() & events.kind.isin(
        ["kernel", "memcpy", "memset", "graph"]
    )
    if (odd := lacking.any(axis=1)).any():
        told = (
            f"{odd.sum()} of {len(events)} events ({', '.join(events.kind[odd].unique())}) have no"
        )
        told = f"{source}: {told} {', '.join(lacking.columns[lacking.any()])}"
        raise ProfileError(f"{told}; without them its sums would be wrong: make the file again")
    return events.astype(
        {"process": "int64", "start_ns": "int64", "end_ns": "int64", "correlation": float}
    )


def range_paths(ranges: pd.DataFrame, launches: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Path of the ranges open when each range begins, itself the last, and at each launch, on any thread.

    ranges: process, name, start_ns, end_ns.
    launches: process, launch_ns.
    """
    spans = ranges[ranges.end_ns > ranges.start_ns]
    edges = pd.concat(
        [spans.assign(at=spans[f"{edge}_ns"], edge=edge) for edge in ("end", "start")]
    )
    # At equal times: a range that ends, then those that begin, the longest first.
    edges = edges.sort_values(
        ["at", "edge", "end_ns"], ascending=[True, True, False], kind="stable"
    )
    is_open, paths = defaultdict(dict), []
    for index, process, name, edge in edges[["process", "name", "edge"]].itertuples(name=None):
        is_open[process].pop(index) if edge == "end" else is_open[process].update({index: name})
        paths.append("/".join(is_open[process].values()))
    edges["path"] = paths
    asked = launches[["process"]].assign(at=launches.launch_ns).sort_values("at").reset_index()
    found = pd.merge_asof(asked, edges[["at", "process", "path"]], on="at", by="process").set_index(
        "index"
    )
    of_ranges = edges.path[edges.edge == "start"].reindex(ranges.index)
    return of_ranges, found.path.reindex(launches.index).fillna("")


def covered(spans: pd.DataFrame, gap_ms: float = 0.0) -> pd.DataFrame:
    """The union of spans that may overlap, gaps of at most `gap_ms` closed: start_ms and end_ms, rising."""
    spans = spans.sort_values("start_ms")
    begins = spans.start_ms > spans.end_ms.cummax().shift() + gap_ms
    return spans.groupby(begins.cumsum().to_numpy()).agg({"start_ms": "min", "end_ms": "max"})


def stages(table: pd.DataFrame) -> pd.Series:
    """The part of each row's range right after the root: forward, backward, optimizer; or the root itself."""
    parts = table.range.str.split("/")
    return parts.str[1].fillna(parts.str[0])


def kernel_table(profile: Profile, root: str = STEP) -> pd.DataFrame:
    """The kernels of one step: range, kernel, class, stream, kind, calls, total_ms; the longest first.

    A step is one time that the range `root` is open; calls and total_ms are means over the steps. What ran
    outside `root`, the warm-up, is left out. Ranges start at `root`.
    Raises ProfileError: no range of that name was recorded; the message lists those that were.
    """
    steps, _, kernels = _inside(profile, root)
    kernels = kernels.assign(total_ms=(kernels.end_ns - kernels.start_ns) * MS)
    grouped = kernels.groupby(["range", "kernel", "class", "stream", "kind"])["total_ms"]
    table = grouped.agg(calls="size", total_ms="sum") / len(steps)
    return table.reset_index().sort_values("total_ms", ascending=False, ignore_index=True)


def kernel_rows(table: pd.DataFrame, smallest_share: float = 2e-3) -> list[dict[str, Any]]:
    """A `kernel_table` as rows: layers summed (layers.*), and kernels that hardly count as "rest".

    Below `smallest_share` of the step's time a kernel does not get its name; each class in each range keeps a
    rest of its own, so all sums stay. What has its name, has all its calls.
    """
    of_kernel = table.groupby(["kernel", "class"]).total_ms.transform("sum")
    kernel = table.kernel.mask(of_kernel < smallest_share * table.total_ms.sum(), "rest")
    ranges = table.range.str.replace(r"\.\d+", ".*", regex=True)
    rows = table.groupby([ranges, kernel, "class"])[["calls", "total_ms"]].sum()
    return rows.reset_index().to_dict("records")


def range_table(profile: Profile) -> pd.DataFrame:
    """Host and device time of a step and of the ranges directly inside it, as means over the steps.

    Returns range; host_ms, how long the range was open; device_span_ms, from its first kernel's start to its
    last one's end; device_busy_ms, the part of it with a kernel running; calls (launches); device_idle_share
    of the span. A range whose device is mostly idle is bound by the host that launches.
    """
    _, ranges, kernels = _inside(profile, STEP)
    ranges = ranges[ranges.range.str.count("/") <= 1]
    table = pd.DataFrame({"range": ranges.range, "host_ms": (ranges.end_ns - ranges.start_ns) * MS})
    for opened in ranges.itertuples():
        own = _since(kernels[kernels.process == opened.process], opened, "launch_ns")
        span_ms = own.end_ms.max() - own.start_ms.min() if len(own) else 0
        busy_ms = covered(own).eval("end_ms - start_ms").sum()
        table.loc[opened.Index, ["device_span_ms", "device_busy_ms", "calls"]] = (
            span_ms,
            busy_ms,
            len(own),
        )
    table = table.groupby("range", sort=False).mean().reset_index()
    span_ms = table.device_span_ms.where(table.calls > 0)
    return table.assign(device_idle_share=1 - table.device_busy_ms / span_ms)


def one_step(profile: Profile) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Ranges, kernels and calls of the last step, for a timeline: as in a `Profile`, paths from the step on.

    Added are start_ms and end_ms, since it began, and of ranges their depth: 0 for the step itself.
    """
    steps, ranges, kernels = _inside(profile, STEP)
    ranges, step = ranges.assign(depth=ranges.range.str.count("/")), steps.iloc[-1]
    return _since(ranges, step), _since(kernels, step, "launch_ns"), _since(profile.calls, step)


def _inside(profile: Profile, root: str) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Each time that `root` is open; the ranges and the kernels inside it, `range` their path from it on."""
    steps = profile.ranges[profile.ranges.name == root]
    if steps.empty:
        names = ", ".join(sorted(set(profile.ranges.name))[:20])
        raise ProfileError(f"the profile has no range {root!r}; it has {names}")
    below = rf"(?:^|/)({re.escape(root)}(?:/.*)?)$"
    inside = (
        of.assign(range=of.range.str.extract(below)[0]) for of in (profile.ranges, profile.kernels)
    )
    return steps, *(each.dropna(subset="range") for each in inside)


def _since(frame: pd.DataFrame, step: Any, time: str = "start_ns") -> pd.DataFrame:
    """The rows whose `time` lies in a step, with start_ms and end_ms since it began."""
    frame = frame[(frame[time] >= step.start_ns) & (frame[time] < step.end_ns)].reset_index(
        drop=True
    )
    start_ms, end_ms = ((frame[edge] - step.start_ns) * MS for edge in ("start_ns", "end_ns"))
    return frame.assign(start_ms=start_ms, end_ms=end_ms)
