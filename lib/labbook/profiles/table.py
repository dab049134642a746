"""One kernel table, whatever saw the kernels: Nsight Systems, torch.profiler on CUDA, or on a CPU.

A kernel belongs to the ranges that are open when it is *launched*, on any thread of its process. Not on its
own thread alone: autograd launches the kernels of backward from a thread that never opened a range. And not
when the kernel runs: by then the host is often several ranges ahead.
"""

import re
from collections import defaultdict
from copy import copy

import pandas as pd

from labbook.profiles.names import kernel_class, short_name

MS = 1e-6  # nanoseconds to milliseconds
STEP = "measure"  # the range of one measured step
_KEYS = [  # tell kernels of a table apart
    "range",
    "kernel",
    "class",
    "stream",
    "kind",
]
# Events by what they are, in the order in which they count at one time.
_END = 0
_START = 1
_LAUNCH = 2
_INTEGERS = dict.fromkeys(["process", "start_ns", "end_ns"], "int64")


class ProfileError(ValueError):
    """A profile cannot answer; the sentence says why, and what to do."""


class Profile:
    """What a profiler recorded; times in nanoseconds on one clock. GPUs of one process are not told apart.

    Inside a range called optimizer, elementwise work, reductions and copies are of the class "optimizer":
    written in plain PyTorch it launches the same kernels as everybody, and only the range tells them apart.

    ranges: process, thread, name, start_ns, end_ns, one row each time that a range was open; and `range`,
        the path of those open then: measure/forward. There a "/" in a name is a ":".
    calls: of the CUDA API: process, thread, name, start_ns, end_ns.
    kernels: name (full), kind, process, stream, start_ns, end_ns, one row each; launch_ns and thread of
        the launch; `range` (path of those open at launch), `kernel` (short name) and `class`.
    """

    def __init__(self, events: pd.DataFrame) -> None:
        """From `complete` events; raises ProfileError where there are no kernels or no ranges among them."""
        self.ranges = events[events.kind == "range"].reset_index(drop=True)
        self.calls = events[events.kind == "call"].reset_index(drop=True)
        activities = events[~events.kind.isin(["range", "call"])]
        if activities.kind.isin(["memcpy", "memset"]).all():
            raise ProfileError("the profile has no kernel in it; did it capture any computing?")
        if self.ranges.empty:
            raise ProfileError(
                "the profile has no ranges in it; run the code under nvtx.recording(), and nsys with "
                "--trace=cuda,nvtx"
            )
        kernels = _with_launches(activities, self.calls)
        spans = self.ranges.rename(columns={"start_ns": "start", "end_ns": "end"})
        moments = kernels[["process"]].assign(at=kernels.launch_ns)
        self.ranges["range"], kernels["range"] = range_paths(spans, moments)
        classes = kernels.name.map(kernel_class)
        is_ordinary = classes.isin(["elementwise", "reduction", "copy/cast"])
        in_optimizer = kernels.range.str.contains(r"(?:^|/)optimizer\b")
        kernels["class"] = classes.mask(is_ordinary & in_optimizer, "optimizer")
        self.kernels = kernels


def _with_launches(activities, calls):
    """What ran, with a short name, and with launch_ns and thread of the call that launched it.

    That is the call of its process that carries its correlation; of several, one inside the other or long
    after, the last that began before it. An operator of a CPU launches itself.
    """
    launches = calls.dropna(subset="correlation").sort_values("start_ns", kind="stable")
    launches = launches[["start_ns", "process", "correlation", "thread"]]
    # Nullable: what no call launched has a gap, and a float would round such times.
    launches["launch_ns"] = launches.start_ns.astype("Int64")
    activities = activities.drop(columns="thread").sort_values("start_ns", kind="stable")
    activities = pd.merge_asof(activities, launches, on="start_ns", by=["process", "correlation"])
    launch_ns = activities.launch_ns.fillna(activities.start_ns).astype("int64")
    return activities.assign(launch_ns=launch_ns, kernel=activities.name.map(short_name))


def complete(events: pd.DataFrame, source: str) -> pd.DataFrame:
    """Events as a `Profile` takes them; raises ProfileError if some lack what sums need.

    events: kind ("range", "call" of the CUDA API; what ran: "kernel", "memcpy", "memset", "graph", on a
        CPU "operator"), name, process, thread, stream, correlation, start_ns, end_ns.
    source: their file, for the message.
    """
    needed = ["name", "process", "thread", "start_ns", "end_ns"]
    is_odd = events[needed].isna().any(axis=1)
    is_odd |= (events.end_ns < events.start_ns).fillna(True).astype(bool)
    if is_odd.any():
        kinds = ", ".join(events.kind[is_odd].unique())
        raise ProfileError(
            f"{source}: {is_odd.sum()} of {len(events)} events ({kinds}) do not have a name, process, thread "
            "and end after their start; record it again"
        )
    return events.astype(_INTEGERS | {"correlation": float})


def range_paths(ranges: pd.DataFrame, launches: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Path of the ranges open when each range begins, itself the last, and at each launch, on any thread.

    By the index of the range, and of the launch. Times are in any unit, of one clock.

    ranges: process, name, start, end.
    launches: process, at.
    """
    spans = ranges[ranges.end > ranges.start]
    ends = spans.assign(at=spans.end, kind=_END)
    starts = spans.assign(at=spans.start, kind=_START)
    # Of ranges that begin at one time the longest is outside.
    events = pd.concat([ends, starts, launches.assign(kind=_LAUNCH)]).sort_values(
        ["at", "kind", "end"], ascending=[True, True, False], kind="stable"
    )
    open_ranges = defaultdict(dict)  # of each process, by index, in the order of their starts
    paths = []
    for event in events.itertuples():
        open_here = open_ranges[event.process]
        if event.kind == _END:
            del open_here[event.Index]
        elif event.kind == _START:
            open_here[event.Index] = event.name.replace("/", ":")  # one part of a path
        paths.append("/".join(open_here.values()))
    events["path"] = paths
    at_start = events.path[events.kind == _START]
    at_launch = events.path[events.kind == _LAUNCH]
    return at_start.reindex(ranges.index), at_launch


def covered(spans: pd.DataFrame, gap_ms: float = 0.0) -> pd.DataFrame:
    """The union of spans that may overlap, gaps of at most `gap_ms` closed: start_ms and end_ms, rising."""
    spans = spans.sort_values("start_ms")
    begins = spans.start_ms > spans.end_ms.cummax().shift() + gap_ms
    union = spans.groupby(begins.cumsum().to_numpy())
    return union.agg({"start_ms": "min", "end_ms": "max"})


def covered_ms(spans: pd.DataFrame) -> float:
    """The length of their union."""
    union = covered(spans)
    return float((union.end_ms - union.start_ms).sum())


def stages(table: pd.DataFrame) -> pd.Series:
    """The part of each row's range right after the root: forward, backward, optimizer; or the root itself."""
    return table.range.str.split("/").str[:2].str[-1]


def kernel_table(profile: Profile, root: str = STEP) -> pd.DataFrame:
    """The kernels of one step: range, kernel, class, stream, kind, calls, total_ms; the longest first.

    A step is one time that the range `root` is open; calls and total_ms are means over the steps. What ran
    outside `root`, the warm-up, is left out. Ranges start at `root`.
    Raises ProfileError: no range of that name was recorded; the message lists those that were.
    """
    steps, _, kernels = _inside(profile, root)
    times_ms = (kernels.end_ns - kernels.start_ns) * MS
    of_kernel = times_ms.groupby([kernels[key] for key in _KEYS])
    means = of_kernel.agg(calls="size", total_ms="sum") / len(steps)
    return means.reset_index().sort_values("total_ms", ascending=False, ignore_index=True)


def kernel_rows(table: pd.DataFrame) -> list[dict]:
    """A `kernel_table` as rows: layers summed (layers.*), and kernels that hardly count as "rest".

    Below 0.2 % of the step's time a kernel does not get its name; each class in each range keeps a rest of
    its own, so all sums stay. What has its name, has all its calls.
    """
    of_kernel = table.groupby(["kernel", "class"]).total_ms.transform("sum")
    is_small = of_kernel < 2e-3 * table.total_ms.sum()
    kernel = table.kernel.mask(is_small, "rest")
    ranges = table.range.str.replace(r"\.\d+", ".*", regex=True)
    sums = table.groupby([ranges, kernel, "class"])[["calls", "total_ms"]].sum()
    return sums.reset_index().to_dict("records")


def range_table(profile: Profile) -> pd.DataFrame:
    """Host and device time of a step and of the ranges directly inside it, as means over the steps.

    Returns range; host_ms, how long the range was open; device_busy_ms, for how long what it launched ran;
    calls (launches). A range whose device is mostly idle is bound by the host that launches.
    """
    _, ranges, kernels = _inside(profile, STEP)
    rows = []
    for span in ranges[ranges.range.str.count("/") <= 1].itertuples():
        launched = _since(kernels, span, "launch_ns")
        rows.append(
            {
                "range": span.range,
                "host_ms": (span.end_ns - span.start_ns) * MS,
                "device_busy_ms": covered_ms(launched),
                "calls": len(launched),
            }
        )
    return pd.DataFrame(rows).groupby("range", sort=False).mean().reset_index()


def within(profile: Profile, name: str) -> Profile:
    """A range and those inside it, with the kernels that they launched."""
    part = copy(profile)
    part.ranges = _below(profile.ranges, name)
    part.kernels = _below(profile.kernels, name)
    return part


def one_step(profile: Profile) -> tuple:
    """Ranges, kernels and calls of the last step, for a timeline: as in a `Profile`, paths from the step on.

    Of several ranks in one report they are of the rank whose step began last.

    Added are start_ms and end_ms, since it began, and of ranges their depth: 0 for the step itself.
    """
    steps, ranges, kernels = _inside(profile, STEP)
    step = steps.iloc[-1]
    ranges["depth"] = ranges.range.str.count("/")
    return _since(ranges, step), _since(kernels, step, "launch_ns"), _since(profile.calls, step)


def _inside(profile, root):
    """Each time that `root` is open; the ranges and the kernels inside it, `range` their path from it on."""
    steps = profile.ranges[profile.ranges.name == root]
    if steps.empty:
        names = ", ".join(profile.ranges.name.unique()[:20])
        raise ProfileError(f"the profile has no range {root!r}; it has {names}")
    return steps, _below(profile.ranges, root), _below(profile.kernels, root)


def _below(frame, root):
    """The rows whose range is `root` or inside it, `range` their path from it on."""
    below = rf"(?:^|/)({re.escape(root.replace('/', ':'))}(?:/.*)?)$"
    paths = frame.range.str.extract(below)[0]
    return frame.assign(range=paths).dropna(subset="range")


def _since(frame, step, time="start_ns"):
    """The rows of its process whose `time` lies in a step, with start_ms and end_ms since it began."""
    is_inside = frame[time].between(step.start_ns, step.end_ns, inclusive="left")
    is_inside &= frame.process == step.process
    frame = frame[is_inside].reset_index(drop=True)
    times_ms = (frame[["start_ns", "end_ns"]] - step.start_ns) * MS
    return frame.assign(start_ms=times_ms.start_ns, end_ms=times_ms.end_ns)
