"""IPython extension of the kernels of a batch.

A cell that measures runs alone, and the steps before it beside those of other kernels. Imports, and what
shows rows once they are measured, need no GPU and wait for nobody. A kernel ends when it has tidied up: to
take torch down, module by module, lasts seconds more.
"""

import atexit
import fcntl
import os
import sys


def load_ipython_extension(shell) -> None:
    """Called by IPython before the first cell: what is registered first is called last."""
    atexit.register(os._exit, 0)
    if room := os.environ.get("LABBOOK_ROOM"):
        take_turns(shell, os.open(room, os.O_CREAT | os.O_RDWR))


def take_turns(shell, room: int) -> None:
    """Let a cell that measures wait for those of other kernels, and these for it.

    room: a file that is open; its lock goes with the process. Others may go before who waits, until all that
        they have left is to measure.
    """

    has_measured = False

    def begin(info):
        nonlocal has_measured
        if not (code := sys.modules.get("labbook.code")):
            return  # it imports
        if any(each.tables for each in code.statements(info.raw_cell)):
            has_measured = True
            fcntl.flock(room, fcntl.LOCK_EX)
        elif not has_measured:
            fcntl.flock(room, fcntl.LOCK_SH)

    def end(result):
        if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # another may measure memory
        fcntl.flock(room, fcntl.LOCK_UN)

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", end)
