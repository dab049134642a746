"""Run a function in a new process: nothing loaded, nothing cached, no GPU context yet."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_fresh_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` in a process of its own and return what it returns; its errors are raised here.

    The function is found by import, so it lives in a module and not in a notebook's cell.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(function, *args, **kwargs).result()
