"""IPython extension of the kernels of a batch.

A cell that measures runs alone, and the steps before it beside those of other kernels. On a GPU, imports and
what shows rows once they are measured wait for nobody: they need no GPU. A kernel ends when it has tidied
up: to take torch down, module by module, lasts seconds more.
"""

import atexit
import fcntl
import os
import sys


def load_ipython_extension(shell) -> None:
    """Called by IPython before the first cell: what is registered first is called last."""
    atexit.register(os._exit, 0)
    if lock := os.environ.get("LABBOOK_LOCK"):
        take_turns(shell, os.open(lock, os.O_CREAT | os.O_RDWR))


def take_turns(shell, lock: int) -> None:
    """Let a cell that measures wait for those of other kernels, and these for it.

    lock: a file that is open; its lock goes with the process. While a cell waits to measure, other steps of
        other kernels may go first, at the longest until these, too, have only cells left that measure.
    """

    no_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # what is measured needs all cores
    has_measured = False

    def begin(info):
        nonlocal has_measured
        code = sys.modules.get("labbook.code")  # before it all is imports
        if code and any(statement.tables for statement in code.statements(info.raw_cell)):
            has_measured = True
            fcntl.flock(lock, fcntl.LOCK_EX)
        elif no_gpu or (code and not has_measured):
            fcntl.flock(lock, fcntl.LOCK_SH)

    def end(result):
        if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # another may measure memory
        fcntl.flock(lock, fcntl.LOCK_UN)

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", end)
