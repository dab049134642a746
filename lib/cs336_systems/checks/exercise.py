"""A step of an exercise: its properties shown one by one, a mistake as a sentence, and the notebook goes on.

with step("the sum of a row") as check:
    check("agrees with torch.sum", torch.allclose(my_sum(x), x.sum(-1)), "is the last block masked?")
"""

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO
from unittest.mock import patch

import torch
from torch import Tensor

from cs336_systems.checks.bounds import inside_tensors

_VERDICTS = {True: "right", False: "not right", None: "not yet"}
# As a stub raises it, here, in another process or inside a kernel; PyTorch's own have a message.
_NOT_WRITTEN = re.compile(r"NotImplementedError(\(\))?:?['\")]*\s*$", re.MULTILINE)
_NONE = "; a missing `return`, a gradient that is not there, a message without async_op=True?"
TIMEOUT_S = 75.0  # more than the time limit of ranks, whose message says where they are
_MOST_PRINTED = 20_000  # characters that a step passes on of what the code inside prints
_AGAIN_S = 5.0  # a time limit that was caught comes again after so long


class Step:
    """What a step has shown so far. passed: every property held; None while it is not written yet."""

    def __init__(self) -> None:
        self.passed: bool | None = True
        self.kept: list[tuple[str, Tensor, Tensor]] = []

    def __call__(self, property: str, holds: Any, diagnosis: str = "") -> None:
        """Show a property; `holds` is anything true or false, `diagnosis` the usual reason if false."""
        show(f"✓ {property}" if holds else f"✗ {property}" + (f": {diagnosis}" if diagnosis else ""))
        self.passed = self.passed and bool(holds)

    def note(self, property: str, holds: Any, hint: str) -> None:
        """Show a property that the assignment does not ask for: without it the step can still be right."""
        show(f"✓ {property}" if holds else f"· not asked for, {property}: {hint}")

    def close(
        self, property: str, found: Any, wanted: Tensor, diagnosis: str = "", **tolerance: float
    ) -> None:
        """Show whether a tensor, or a number, is the wanted one by torch.allclose.

        AssertionError: it is None, no tensor, of another shape, dtype or device, or not finite.
        """
        if isinstance(found, int | float):
            found = torch.tensor(found, dtype=wanted.dtype)
        assert_tensor(property, found, wanted)
        kind, wanted_kind = (f"{tuple(x.shape)}, {x.dtype}" for x in (found, wanted))
        assert kind == wanted_kind, f"{property}: it is {kind}; wanted: {wanted_kind}"
        finite = bool(found.isfinite().all()) or not wanted.isfinite().all()
        assert finite, f"{property}: it has NaN or infinities" + (f"; {diagnosis}" if diagnosis else "")
        self(property, torch.allclose(found, wanted, **tolerance), diagnosis)

    def equal(self, property: str, found: Any, wanted: Any, diagnosis: str = "") -> None:
        """Show whether what was returned is what was wanted, and if not, what it was. None is an error."""
        _assert_something(property, found)
        self(property, found == wanted, f"{found!r:.80}" + (f"; {diagnosis}" if diagnosis else ""))

    def keeps(self, **tensors: Tensor) -> None:
        """The step is right only if these hold in the end what they hold now."""
        self.kept += [(name, tensor, tensor.detach().clone()) for name, tensor in tensors.items()]


def assert_tensor(what: str, found: Any, wanted: Tensor) -> None:
    """AssertionError: what was returned is None, no tensor, or on another device."""
    _assert_something(what, found)
    assert isinstance(found, Tensor), f"{what}: {type(found).__name__} is returned; wanted: a tensor"
    assert found.device == wanted.device, f"{what}: it is on {found.device}; wanted: on {wanted.device}"


def _assert_something(what: str, found: Any) -> None:
    assert found is not None, f"{what}: nothing is returned; is a `return` missing?"


def show(line: str) -> None:
    """Print a line that no step cuts off."""
    getattr(sys.stdout.write, "uncut", sys.stdout.write)(f"{line}\n")


@contextlib.contextmanager
def step(name: str, timeout_s: float = TIMEOUT_S) -> Iterator[Step]:
    """Check one step of an exercise. What is raised inside ends there, save a real Ctrl-C and under nbgrader.

    What is not written yet (a bare NotImplementedError, in another process too) is "not yet", anything else
    that is raised is a mistake: of an AssertionError the message is shown, of others the type too. Kernels in
    Triton's interpreter cannot reach beyond their tensors; of very long output only the beginning is printed.

    Args:
        name: printed with the verdict.
        timeout_s: seconds after which the Python code inside counts as hanging.
    """
    found, mistake, by_user = Step(), "", []
    try:
        with _limited(timeout_s, by_user), _cut(sys.stdout), _cut(sys.stderr), inside_tensors(show):
            yield found
            for tensor, now, before in found.kept:
                if not torch.equal(now, before):
                    found(f"{tensor} stays as it was", False, "it was overwritten; clone it first")
    except BaseException as error:
        if by_user:
            raise
        mistake = _sentence(error)
        found.passed = None if _NOT_WRITTEN.search(mistake) else False
    if mistake and found.passed is False:
        first = mistake.partition("\n\n")[0]  # without the stacks of other processes
        show(f"✗ {first:.2000}" + (_NONE if "NoneType" in first else ""))
    verdict = f"{name}: {_VERDICTS[found.passed]}"
    show(verdict)
    if not found.passed and os.environ.get("NBGRADER_EXECUTION"):  # nbgrader gives no point for an error
        raise AssertionError(verdict)


class _TimeIsUp(BaseException):
    """Not an Exception: a solution may catch those, and go on."""


def _sentence(error: BaseException) -> str:
    while type(error).__name__ == "InterpreterError" and error.__cause__:  # around what was raised
        error = error.__cause__
    kind = type(error).__name__
    if not isinstance(error, Exception | _TimeIsUp):
        return f"{kind} was raised, which would end the notebook's kernel; raise an Exception, or return"
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be printed"
    return text if text and isinstance(error, AssertionError | _TimeIsUp) else f"{kind}: {text}"


@contextlib.contextmanager
def _limited(timeout_s: float, by_user: list[bool]) -> Iterator[None]:
    """Raise _TimeIsUp after some seconds, and note in `by_user` that the user interrupts.

    Only Python code can be stopped, on the main thread, where the platform has timers.
    """

    def stop(*_: Any) -> None:
        raise _TimeIsUp(f"not done within {timeout_s:g} s; does a loop never end?")

    def interrupt(*how: Any) -> None:
        by_user.append(True)
        before[signal.SIGINT](*how)

    before = {}
    try:
        if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, stop)
            if callable(signal.getsignal(signal.SIGINT)):
                before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
            signal.setitimer(signal.ITIMER_REAL, timeout_s, _AGAIN_S)
        yield
    finally:
        if before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _cut(stream: TextIO) -> Iterator[None]:
    """Of what is printed on a stream the first characters pass; `write.uncut` passes on all."""
    write, left = stream.write, _MOST_PRINTED

    def cut(text: str) -> int:
        nonlocal left
        if left >= 0:
            end = "\n... the rest of what is printed here is not shown\n" if left < len(text) else ""
            write(text[:left] + end)
        left -= len(text)
        return len(text)

    cut.uncut = getattr(write, "uncut", write)
    with patch.object(stream, "write", cut):
        yield
