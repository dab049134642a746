"""A step of an exercise: its properties shown one by one, a mistake as a sentence, and the notebook goes on.

with step("the sum of a row") as check:
    check("agrees with torch.sum", torch.allclose(my_sum(x), x.sum(-1)), "is the last block masked?")
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

_VERDICTS = {True: "right", False: "not right", None: "not yet"}


class Step:
    """What a step has shown so far.

    Attributes:
        passed: every property held; None while the step is not written yet.
    """

    def __init__(self) -> None:
        self.passed: bool | None = True

    def __call__(self, property: str, holds: Any, suspect: str = "") -> None:
        """Show a property; `holds` is anything that is true or false, `suspect` the usual reason if false."""
        if holds := bool(holds):
            print(f"✓ {property}")
        else:
            print(f"✗ {property}" + (f": {suspect}" if suspect else ""))
        self.passed = self.passed and holds


@contextlib.contextmanager
def step(name: str, timeout_s: float = 120.0) -> Iterator[Step]:
    """Check one step of an exercise. Nothing that is raised inside leaves it, save when nbgrader grades.

    What is not written yet (NotImplementedError, in another process too) is "not yet", anything else that is
    raised is a mistake: an AssertionError speaks for itself, of other errors the type is told.

    Args:
        name: of the step, said in its verdict.
        timeout_s: seconds after which the code inside counts as hanging.
    """
    found, mistake = Step(), ""
    try:
        with _time_limit(timeout_s):
            yield found
    except NotImplementedError:
        found.passed = None
    except Exception as error:
        mistake = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        found.passed = None if "NotImplementedError" in mistake else False
    if mistake and found.passed is False:
        print("✗ " + mistake.partition("\n\n")[0])  # without the stacks of other processes
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
