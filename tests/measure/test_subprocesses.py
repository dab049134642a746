"""A fresh process shares nothing with this one, and hands back results and errors."""

import math
import os

import pytest

from cs336_systems.measure.subprocesses import in_fresh_process


def test_another_process_computes_and_returns():
    assert in_fresh_process(os.getpid) != os.getpid()


def test_its_error_is_raised_here():
    with pytest.raises(ValueError, match="math domain error"):
        in_fresh_process(math.sqrt, -1)
