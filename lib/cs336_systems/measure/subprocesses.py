"""Run functions in new processes: nothing loaded, nothing cached, no GPU context yet."""

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from cs336_systems.measure.requirements import core_count


def in_fresh_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` in a process of its own and return what it returns; its errors are raised here.

    The function is found by import, so it lives in a module and not in a notebook's cell.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(function, *args, **kwargs).result()


def in_processes(function: Callable[..., Any], calls: Iterable[tuple], most: int = 12) -> list[Any]:
    """Call `function(*arguments)` for all of `calls`, several at once, in new processes.

    Compilers keep what they make on disk, so what was called there once starts at once here.

    Returns:
        The results in order; None for a call that failed, or whose process did.
    """
    calls = list(calls)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(most, core_count(), len(calls))), mp_context=spawn) as pool:
        futures = [pool.submit(function, *arguments) for arguments in calls]
        return [None if future.exception() else future.result() for future in futures]
