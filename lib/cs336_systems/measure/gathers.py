"""When the weights of each unit were gathered, and when the GPU could have begun to compute with them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import pandas as pd
from torch import Tensor, nn

from cs336_systems.nvtx import annotate
from labbook.profiles.table import MS, Profile, ProfileError, attribute

_NEEDS = "needs "
_IS_GATHER = r"(?i)^(?:nccl|gloo:).*all_?gather"  # what runs on the device, not the operator that asks for it


@contextmanager
def needs_recorded(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Mark in a recording when the host comes to each of the modules, in forward and in backward.

    The marks come before the hooks that an FSDP has put on the modules.
    """

    def mark(name: str, *_: object) -> None:
        with annotate(_NEEDS + name):
            pass

    def mark_backward(name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        output.register_hook(partial(mark, name))

    with ExitStack() as hooks:
        for name, module in modules.items():
            before = module.register_forward_pre_hook(partial(mark, name), prepend=True)
            after = module.register_forward_hook(partial(mark_backward, name), prepend=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield


def gather_times(profile: Profile, forward: Sequence[str], backward: Sequence[str]) -> pd.DataFrame:
    """When the weights of each unit were gathered in the last recorded step.

    Args:
        profile: of steps inside ranges "measure", recorded under `needs_recorded`.
        forward, backward: the units that are gathered in each pass, in their order. What is not in a list is
            gathered in one message; members of lists (layers.3), each in as many as are left over.

    Returns:
        pass, unit, calls (messages); start_ms, end_ms of its messages; and needed_ms, when the stream that
        computes had done all before the unit and the host had launched what comes next. A gather that ended
        later was waited for. Milliseconds since the step began.

    Raises:
        ProfileError: no recorded step, or other messages than these units explain.
    """
    steps = profile.ranges[profile.ranges.name == "measure"]
    if steps.empty:
        raise ProfileError("the profile has no range 'measure'")
    step = steps.iloc[-1]
    kernels = attribute(profile)
    kernels = kernels[kernels.launch_ns.between(step.start_ns, step.end_ns)].sort_values("launch_ns")
    sent = kernels["class"] == "communication"
    computed = kernels[~sent]
    duration = (computed.end_ns - computed.start_ns).groupby(computed.stream).sum()
    computed = computed[computed.stream == duration.idxmax()]
    gathered = kernels[sent & kernels.name.str.contains(_IS_GATHER)]
    marks = profile.ranges[profile.ranges.name.str.startswith(_NEEDS)]
    marks = marks[marks.start_ns.between(step.start_ns, step.end_ns)]
    begun = _start_of(profile, step, "backward")
    rows = []
    for pass_, units in (("forward", forward), ("backward", backward)):
        late = gathered.launch_ns >= begun
        messages = gathered[late if pass_ == "backward" else ~late]
        counts = _messages_of_each(len(messages), units)
        of_pass = marks[(marks.start_ns >= begun) == (pass_ == "backward")].set_index("name")["start_ns"]
        first = 0
        for unit, count in zip(units, counts, strict=True):
            own = messages.iloc[first : first + count]
            first += count
            needed = _could_begin(computed, of_pass[_NEEDS + unit])
            times = (own.start_ns.min(), own.end_ns.max(), needed)
            rows.append((pass_, unit, count, *((time - step.start_ns) * MS for time in times)))
    return pd.DataFrame(rows, columns=["pass", "unit", "calls", "start_ms", "end_ms", "needed_ms"])


def _start_of(profile: Profile, step: pd.Series, name: str) -> int:
    inside = profile.ranges[(profile.ranges.name == name) & (profile.ranges.start_ns >= step.start_ns)]
    if inside.empty:
        raise ProfileError(f"the step has no range {name!r}")
    return inside.start_ns.min()


def _messages_of_each(total: int, units: Sequence[str]) -> list[int]:
    in_lists = [bool(re.search(r"\.\d", unit)) for unit in units]
    count, others = sum(in_lists), len(units) - sum(in_lists)
    of_each, left = divmod(total - others, max(count, 1))
    if left or of_each < 1:
        raise ProfileError(f"{total} all-gathers are not those of {count} in blocks and {others} others")
    return [of_each if is_in_list else 1 for is_in_list in in_lists]


def _could_begin(computed: pd.DataFrame, mark: int) -> int:
    """The end of what was launched before the mark, or the launch of what comes after it if that is later."""
    before, after = computed[computed.launch_ns < mark], computed[computed.launch_ns >= mark]
    times = [before.end_ns.max()] if len(before) else []
    times += [after.launch_ns.min()] if len(after) else []
    return max(times)
