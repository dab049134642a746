"""Properties of what a reader writes, and the step of an exercise that shows them one by one.

A mistake is shown as a sentence, and the notebook goes on:

    with step("the sum of a row") as check:
        check("agrees with torch.sum", torch.allclose(my_sum(x), x.sum(-1)), "is the last block masked?")
"""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.checks.bounds import inside_tensors

_VERDICTS = {True: "right", False: "not right", None: "not yet"}
# As a stub raises it, here, in another process or inside a kernel; PyTorch's own have a message.
_NOT_WRITTEN = re.compile(r"NotImplementedError(\(\))?:?['\")]*\s*$", re.MULTILINE)
_NOTHING = "nothing is returned; is a `return` missing?"
_COUNT = "; are as many values returned as wanted?"
_HINTS = {"NoneType": "; is a `return` missing?", "unpack": _COUNT, "zip()": _COUNT}
TIMEOUT_S = 75.0  # more than the time limit of ranks, whose message says where they are


def waits(function: Callable, *inputs) -> str:
    """Why a function of modules and tensors would wait for a GPU, or not run there; "" if it would.

    It gets copies on the device "meta", which has no numbers: nothing that needs one comes back from there,
    and nothing that lies on another device can be put beside them.
    """

    def wait(*_):
        raise RuntimeError("a tensor is printed, or a device waited for")

    copies = [deepcopy(x).to("meta") if hasattr(x, "to") else x for x in inputs]
    try:
        with patch("torch.Tensor.__repr__", wait), patch("torch.cuda.synchronize", wait):
            results = tree_leaves(function(*copies))
        elsewhere = [x.device for x in results if isinstance(x, Tensor) and not x.is_meta]
        assert not elsewhere, f"what is returned is on {elsewhere}"
    except Exception as error:
        return f"it would wait for the GPU, or a tensor is not where the inputs are; {error!s:.80}"
    return ""


def autocast_seen(module: nn.Module) -> list[bool]:
    """It grows: whether autocast is on in each forward, and as the first parameter's gradient comes."""
    seen = []

    def note(*_):
        seen.append(torch.is_autocast_enabled("cpu"))

    module.register_forward_hook(note)
    next(module.parameters()).register_hook(note)
    return seen


class StepCheck:
    """What a step has shown so far. passed: every property held; None while it is not written yet.

    work: what interpreted kernels have done since the step began, see `inside_tensors`.
    """

    def __init__(self):
        self.passed = True
        self.kept = []

    def __call__(self, property: str, holds, diagnosis: str = ""):
        """Show a property; `holds` is anything true or false, `diagnosis` the usual reason if false."""
        reason = f": {diagnosis}" if diagnosis and not holds else ""
        print(f"{'✓' if holds else '✗'} {property}{reason}")
        self.passed = self.passed and bool(holds)

    def close(self, property: str, result, wanted: Tensor, diagnosis: str = "", **tolerance):
        """Show whether a tensor, or a number, is the wanted one by torch.allclose.

        AssertionError: it is None, no tensor, of another shape, dtype or device, or not finite.
        """
        if isinstance(result, int | float):
            result = wanted.new_tensor(result)
        assert_tensor(property, result, wanted)
        assert result.isfinite().all() or not wanted.isfinite().all(), (
            f"{property}: it has NaN or infinities; {diagnosis}".removesuffix("; ")
        )
        self(property, torch.allclose(result, wanted, **tolerance), diagnosis)

    def equal(self, property: str, result, wanted, diagnosis: str = ""):
        """Show whether what was returned is what was wanted, and if not, what it was. None is an error."""
        assert result is not None, f"{property}: {_NOTHING}"
        self(property, result == wanted, f"{result!r:.80}; {diagnosis}".removesuffix("; "))

    def anywhere(self, property: str, function: Callable, *inputs):
        """Show whether a function runs on any device without waiting for it, see `waits`."""
        reason = waits(function, *inputs)
        self(property, not reason, reason)

    def at_most(self, property: str, **most: int):
        """The step is right only if interpreted kernels have done no more; what others do is not known."""
        for kind, enough in most.items():
            if self.work[kind] > enough:
                self(property, False, f"{self.work[kind]} {kind}, enough are {enough}")

    def keeps(self, **tensors: Tensor):
        """The step is right only if these hold in the end what they hold now."""
        self.kept += [(name, tensor, tensor.detach().clone()) for name, tensor in tensors.items()]


def assert_tensor(what: str, result, wanted: Tensor):
    """AssertionError: what was returned is None, no tensor, or of another device, shape or dtype."""
    assert result is not None, f"{what}: {_NOTHING}"
    assert isinstance(result, Tensor), f"{what}: {type(result).__name__} is returned, no tensor"
    assert result.device == wanted.device, f"{what} is on {result.device}, not {wanted.device}"
    kind = f"{tuple(result.shape)}, {result.dtype}"
    right = f"{tuple(wanted.shape)}, {wanted.dtype}"
    assert kind == right, f"{what} is {kind}; wanted: {right}"


def formula(result):
    """The SymPy expression that a solution returned, its decimals fractions; AssertionError: it is none."""
    import sympy as sp  # it takes most of a second, and every rank imports this file

    assert result is not None, _NOTHING
    assert not isinstance(result, list | tuple | dict), f"a {type(result).__name__} is no formula"
    return sp.nsimplify(result, rational=True)


@contextlib.contextmanager
def step(name: str, timeout_s: float = TIMEOUT_S) -> Iterator[StepCheck]:
    """Check one step of an exercise. What is raised inside ends there, save Ctrl-C and under nbgrader.

    What is not written yet (a bare NotImplementedError, in another process too) is "not yet", anything else
    that is raised is a mistake: of an AssertionError the message is shown, of others the type too. Kernels in
    Triton's interpreter cannot reach beyond their tensors.
    Python code counts as hanging after timeout_s seconds.
    """
    check = StepCheck()
    try:
        with _limited(timeout_s), inside_tensors() as check.work:
            yield check
            for label, now, before in check.kept:
                if not torch.equal(now, before):
                    check(f"{label} stays as it was", False, "it was overwritten; clone it first")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        mistake = _sentence(error)
        if _NOT_WRITTEN.search(mistake):
            check.passed = None
        else:
            check.passed = False
            # Without the stacks of other processes.
            mistake, *_ = mistake.split("\n\n")
            print(f"✗ {mistake:.2000}")
    verdict = f"{name}: {_VERDICTS[check.passed]}"
    print(verdict)
    # nbgrader gives no point where a cell raises an error, and only there.
    if not check.passed and os.environ.get("NBGRADER_EXECUTION"):
        raise AssertionError(verdict)


class _TimeIsUp(BaseException):
    """Not an Exception: a solution may catch those, and go on."""


def _sentence(error):
    # Triton's, around what was raised.
    while type(error).__name__ == "InterpreterError" and error.__cause__:
        error = error.__cause__
    kind = type(error).__name__
    if not isinstance(error, Exception | _TimeIsUp):
        return f"{kind} was raised, which would end the notebook's kernel; raise an Exception, or return"
    text = str(error)
    # Of a solution that returned too little, in what uses it.
    text += next((hint for word, hint in _HINTS.items() if word in text), "")
    return text if text and isinstance(error, AssertionError | _TimeIsUp) else f"{kind}: {text}"


@contextlib.contextmanager
def _limited(timeout_s):
    """Raise _TimeIsUp after some seconds, in Python code; only the main thread may do that."""

    def stop(*_):
        raise _TimeIsUp(f"not done within {timeout_s:g} s; does a loop never end?")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        # Again after 5 s, if a solution catches it.
        signal.setitimer(signal.ITIMER_REAL, timeout_s, 5.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
