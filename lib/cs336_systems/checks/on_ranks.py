"""Properties of a reader's class, tried by several processes: the runner, and what the properties use."""

import contextlib
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from inspect import signature

import cloudpickle  # takes classes of a notebook by value
import torch
import torch.distributed as dist

from cs336_systems.parallel import WorkerError, stream
from cs336_systems.traffic import watch_collectives


class Property(str):
    """The name of what a checker has asked of a candidate, and has held."""


MEET = ""


def checker(properties, also_alone=False):
    """Makes `properties(candidate, **wanted)` a check(candidate, *, world_size=2, timeout_s=60, **options).

    Every rank of some CPU processes runs the generator, which yields what is wrong, the likeliest first, and
    behind it the Property that has held. There all ranks meet: none goes on once one has found a mistake, and
    all communication of a property is over. With MEET they meet where nothing is to be said yet. What holds
    is printed. Options that are not `wanted` are for the candidate, which may be defined in a notebook.
    It raises AssertionError: what is wrong, where, and how to mend it.
    world_size: 1 to 4; the sizes of what is tried are made for them.
    also_alone: in the end every rank is asked all of it again, in a world of its own.
    """

    @wraps(properties)
    def check(candidate, *, world_size=2, timeout_s=60.0, **options):
        names = options.keys() & signature(properties).parameters
        wanted = {name: options.pop(name) for name in names}
        configured = partial(candidate, **options) if options else candidate
        job = cloudpickle.dumps((configured, partial(properties, **wanted)))
        name = getattr(candidate, "__name__", repr(candidate))
        right = 0
        try:
            findings = stream(
                try_properties, world_size, job, also_alone, backend="gloo", timeout_s=timeout_s
            )
            for finding, mistakes in findings:
                if mistakes:
                    raise AssertionError("\n".join(f"{name}, {mistake}" for mistake in mistakes))
                print(f"✓ {finding}")
                right += 1
        except WorkerError as error:
            hint = ""
            if "not done" in error.cause or "gloo" in error.cause:
                hint = " (do all ranks send the same, in the same order?)"
            raise AssertionError(f"{name} did not get through{hint}: {error}") from error
        print(f"{name}: {right} cases right on {world_size} ranks")

    return check


# For what must hold whatever the world size.
checker_in_any_world = partial(checker, also_alone=True)


def try_properties(context, pickled, also_alone=False):
    """What is wrong in the first property that fails on any rank, of a pickled (candidate, properties)."""
    # So that PyTorch fills new memory, torch.empty's, with NaN: what a candidate forgets to write shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Before the class imports the functions, in whichever way.
    with watch_collectives(notify=_notify_observers, checks=True), observed() as sent:
        candidate, properties = cloudpickle.loads(pickled)
        for finding in properties(candidate):
            mistake = "" if isinstance(finding, Property) else finding
            # What is still under way may or may not have arrived, so it is the better explanation.
            mistakes = _with_their_ranks(from_all(_unfinished(sent) or mistake))
            sent.clear()
            if finding or mistakes:
                context.send((finding, mistakes))
            if mistakes:
                return mistakes
    if also_alone:
        # A constant in place of the world size is wrong in the smallest of worlds.
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for mistake in try_properties(replace(context, send=lambda _: None), pickled):
            context.send(("", [f"in a world of one rank, {mistake}"]))
    return []


def _with_their_ranks(by_rank):
    """Each mistake once, and which ranks make it."""
    ranks = {}
    for rank, mistake in enumerate(by_rank):
        if mistake:
            ranks.setdefault(mistake, []).append(str(rank))
    return [f"rank {', '.join(numbers)}: {mistake}" for mistake, numbers in ranks.items()]


def from_all(own):
    """What every rank has, by rank."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def open_store():
    """Where ranks tell each other something, whatever their messages wait for."""
    trial = from_all(time.monotonic_ns())[0]
    return dist.PrefixStore(f"{trial}", dist.distributed_c10d._get_default_store())


def comes(store, event):
    """Whether somebody sets it, as passes take milliseconds."""
    try:
        store.wait([event], timedelta(seconds=5))
    except RuntimeError:
        return False
    return True


def close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def unlike(what, tensor, wanted, diagnoses, otherwise, alike=close):
    """Nothing where a tensor is the wanted one; else what it is: the diagnosis whose tensor it is like."""
    # A mistake ends the check: only a tensor gets past this.
    if tensor is None:
        yield f"{what} is missing. Keep forward inside autograd, its all-reduce too."
    if not alike(tensor, wanted):
        likely = (text for text, other in diagnoses.items() if alike(tensor, other))
        yield f"{what} is {next(likely, otherwise)}"


def _unfinished(sent):
    handles = [message for message in sent if message.is_async]
    late = [message.collective for message in handles if not message.waited_for]
    if not late:
        return ""
    return (
        f"{len(late)} of {len(handles)} {late[0].replace('_', '-')}s may still be under way at the end. Keep "
        f"every handle that {late[0]}(..., async_op=True) returns, and wait() for it."
    )


_observers = []


@contextlib.contextmanager
def observed(notify=lambda message: None):
    """The messages that the candidate starts inside; `notify` is called with each when it starts."""
    messages = []
    _observers.append((messages, notify))
    try:
        yield messages
    finally:
        _observers.pop()


def _notify_observers(message):
    for messages, notify in _observers:
        messages.append(message)
        notify(message)
