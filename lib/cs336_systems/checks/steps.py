"""A step of an exercise: its properties shown one by one, a mistake as a sentence, and the notebook goes on.

with step("the sum of a row") as check:
    check("agrees with torch.sum", torch.allclose(my_sum(x), x.sum(-1)), "is the last block masked?")
"""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cs336_systems.checks.bounds import inside_tensors

_VERDICTS = {True: "right", False: "not right", None: "not yet"}
# As a stub raises it, here, in another process or inside a kernel; PyTorch's own have something to say.
_NOT_WRITTEN = re.compile(r"NotImplementedError(\(\))?:?['\")]*\s*$", re.MULTILINE)
_NONE = "; a missing `return`, a gradient that is not there, a message without async_op=True?"


class Step:
    """What a step has shown so far.

    Attributes:
        passed: every property held; None while the step is not written yet.
    """

    def __init__(self) -> None:
        self.passed: bool | None = True
        self._kept: list[tuple[str, Tensor, Tensor]] = []

    def __call__(self, property: str, holds: Any, suspect: str = "") -> None:
        """Show a property; `holds` is anything that is true or false, `suspect` the usual reason if false."""
        if holds := bool(holds):
            print(f"✓ {property}")
        else:
            print(f"✗ {property}" + (f": {suspect}" if suspect else ""))
        self.passed = self.passed and holds

    def close(self, property: str, found: Any, wanted: Tensor, suspect: str = "", **tolerance: float) -> None:
        """Show whether a tensor, or a number, is the wanted one, as torch.allclose tells it.

        Raises:
            AssertionError: it is nothing, no tensor, of another shape or dtype, elsewhere, or not finite.
        """
        if isinstance(found, int | float):
            found = torch.tensor(found, dtype=wanted.dtype)
        assert_tensor(property, found, wanted)
        told, asked = (f"{tuple(x.shape)}, {x.dtype}" for x in (found, wanted))
        assert told == asked, f"{property}: it is {told}; wanted: {asked}"
        finite = bool(found.isfinite().all()) or not wanted.isfinite().all()
        assert finite, f"{property}: it has NaN or infinities" + (f"; {suspect}" if suspect else "")
        self(property, torch.allclose(found, wanted, **tolerance), suspect)

    def equal(self, property: str, found: Any, wanted: Any, suspect: str = "") -> None:
        """Show whether what was returned is what was wanted, and if not, what it was.

        Raises:
            AssertionError: it is nothing.
        """
        _assert_something(property, found)
        told = f"{found!r:.80}" + (f"; {suspect}" if suspect else "")
        self(property, found == wanted, told)

    def keeps(self, **tensors: Tensor) -> None:
        """The step is right only if these hold in the end what they hold now."""
        self._kept += [(name, tensor, tensor.detach().clone()) for name, tensor in tensors.items()]

    def overwritten(self) -> None:
        """Show which of the tensors that had to stay as they were did not."""
        for name, tensor, before in self._kept:
            if not torch.equal(tensor, before):
                self(f"{name} stays as it was", False, "it was overwritten; clone it first")


def assert_tensor(what: str, found: Any, wanted: Tensor) -> None:
    """An AssertionError in a sentence where what was returned is no tensor, or one of another device."""
    _assert_something(what, found)
    assert isinstance(found, Tensor), f"{what}: {type(found).__name__} is returned; wanted: a tensor"
    assert found.device == wanted.device, f"{what}: it is on {found.device}; wanted: on {wanted.device}"


def _assert_something(what: str, found: Any) -> None:
    assert found is not None, f"{what}: nothing is returned; is a `return` missing?"


@contextlib.contextmanager
def step(name: str, timeout_s: float = 120.0) -> Iterator[Step]:
    """Check one step of an exercise. Nothing that is raised inside leaves it, save when nbgrader grades.

    What is not written yet (a bare NotImplementedError, in another process too) is "not yet", anything else
    that is raised is a mistake: an AssertionError speaks for itself, of other errors the type is told.
    Kernels in Triton's interpreter cannot reach beyond their tensors.

    Args:
        name: of the step, said in its verdict.
        timeout_s: seconds after which the code inside counts as hanging.
    """
    found, mistake = Step(), ""
    try:
        with _time_limit(timeout_s), inside_tensors():
            yield found
            found.overwritten()
    except Exception as error:
        while type(error).__name__ == "InterpreterError" and error.__cause__:  # around what was raised
            error = error.__cause__
        mistake = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        found.passed = None if _NOT_WRITTEN.search(mistake) else False
    if mistake and found.passed is False:
        told = mistake.partition("\n\n")[0]  # without the stacks of other processes
        print(f"✗ {told}" + (_NONE if "NoneType" in told else ""))
    print(f"{name}: {_VERDICTS[found.passed]}")
    if not found.passed and os.environ.get("NBGRADER_EXECUTION"):  # nbgrader gives no point for an error
        raise AssertionError(f"{name}: {_VERDICTS[found.passed]}")


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """A TimeoutError here after so many seconds; without one where there are no signals, or on a thread."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done within {seconds:g} s; does a loop never end?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
