"""A fresh process shares nothing with this one, and hands back results and errors."""

import math
import os

import pytest

from cs336_systems.measure.subprocesses import in_fresh_process, in_processes


def test_another_process_computes_and_returns():
    assert in_fresh_process(os.getpid) != os.getpid()


def test_its_error_is_raised_here():
    with pytest.raises(ValueError, match="math domain error"):
        in_fresh_process(math.sqrt, -1)


def test_several_calls_come_back_in_order_and_one_that_failed_is_none():
    assert in_processes(math.sqrt, [(4,), (-1,), (9,)]) == [2, None, 3]
    assert in_processes(math.sqrt, []) == []
