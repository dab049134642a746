"""Kernels of notebooks, and learners' copies, as forks of the server that the tests' ranks come from.

It has imported what they import, and a kernel's own ranks come from it, too; else each would import torch.
`pytest --nbval notebooks` alone and `make run` start kernels as Jupyter does.
"""

import os
import time
from multiprocessing import forkserver

from jupyter_client.provisioning import local_provisioner

from cs336_systems.parallel.launch import _PRELOADED, _start_method


def install():
    """Where ranks are forks, kernels are."""
    _PRELOADED.extend(["ipykernel.kernelapp", "labbook.page", "sympy", "tests.labbook.preloaded"])
    if _start_method().get_start_method() == "forkserver":
        local_provisioner.launch_kernel = start_kernel


def fork(target, *args):
    """A process started by the server."""
    context = _start_method()
    forkserver.ensure_running()
    key = getattr(forkserver._forkserver, "_forkserver_authkey", None)  # from Python 3.14 on
    process = context.Process(target=_run, args=(key, target) + args)
    process.start()
    return process


def _run(key, target, *args):
    """In the process: its children come from the same server."""
    server = forkserver._forkserver
    server._forkserver_authkey = key
    forkserver.ensure_running = server.ensure_running = lambda: None
    target(*args)


def start_kernel(command, *, cwd, env, **_):
    """What jupyter_client's `launch_kernel` does; the process can do what it asks of a Popen."""
    process = fork(run_kernel, command, cwd, env)
    while os.getpgid(process.pid) != process.pid:  # who interrupts it signals to its group
        time.sleep(0.01)
    process.poll = lambda: process.exitcode
    process.wait = process.join
    process.stdin = process.stdout = process.stderr = None
    return process


def run_kernel(command, cwd, env):
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    import matplotlib
    from ipykernel.kernelapp import launch_new_instance

    # A kernel tells matplotlib before it is imported.
    matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"
    launch_new_instance(argv=command[-2:])
