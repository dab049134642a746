"""Ranks of one machine as if each were a host: a network namespace each, joined by links of a given rate.

A link this slow is the bottleneck, so models of communication can be tested without a GPU where they bind.
"""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.launch import WorkerContext

_CLONE_NEWNET = 0x40000000
_INTERFACE, _ADDRESS = "host", "10.33.6.{}/24"
_RATE = "rate {:g}mbit burst {:g}kb latency 100ms"


def why_no_slow_link() -> str:
    """Why this process cannot call `slow_link`; "" if it can."""
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"there is no {' and no '.join(missing)} (Linux has them in iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "a network namespace needs root"
    made = "ip link add end1 type veth peer name end2 && ip link add switch type bridge"
    tried = f"{made} && tc qdisc add dev end1 root tbf {_RATE.format(1, 32)}"
    done = subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def slow_link(context: WorkerContext, gbps: float) -> None:
    """From now on this rank sends at most `gbps` GB/s (10**9 bytes), as all ranks do; all have to call it.

    The first call moves each rank to a network namespace of its own, which ends with its process, and makes
    the process group anew: what was made with the old one cannot be used any more.

    Raises:
        RuntimeError: the machine cannot (see `why_no_slow_link`), or a command failed; it says which.
        ValueError: the backend is not Gloo, or gbps is not above 0.
    """
    if context.backend != "gloo" or not gbps > 0:
        raise ValueError(
            f"backend {context.backend!r}, {gbps!r} GB/s; allowed: 'gloo', and a rate above 0"
        )
    if reason := why_no_slow_link():
        raise RuntimeError(f"no slow link here: {reason}")
    if _INTERFACE not in [name for _, name in socket.if_nameindex()]:
        _move_apart(context)
    dist.barrier()  # nothing is queued any more: what is larger than a smaller burst would never leave
    burst_kb = max(32, 2000 * gbps)  # what may leave at once after a pause: 2 ms of the rate
    _command(f"tc qdisc replace dev {_INTERFACE} root tbf {_RATE.format(8000 * gbps, burst_kb)}")
    dist.barrier()


def _move_apart(context: WorkerContext) -> None:
    """Each rank in its own namespace, its interface plugged into a switch in rank 0's."""
    rank, processes = context.rank, [None] * context.world_size
    dist.all_gather_object(processes, os.getpid())
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise RuntimeError(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    dist.barrier()  # old connections stay in the old namespace, and work
    _command(f"ip link add {_INTERFACE} type veth peer name port{rank} netns {processes[0]}")
    _command(f"ip addr add {_ADDRESS.format(rank + 1)} dev {_INTERFACE}")
    for interface in ("lo", _INTERFACE):
        _command(f"ip link set {interface} up")
    dist.barrier()
    if rank == 0:
        _command("ip link add switch type bridge")
        for interface in (
            "switch",
            *(f"port{other} master switch" for other in range(context.world_size)),
        ):
            _command(f"ip link set {interface} up")
    dist.barrier()
    store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    dist.init_process_group("gloo", store=store, world_size=context.world_size, rank=rank)


def _command(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{line}: {done.stderr.strip() or done.returncode}")


class Host:
    """A network namespace in which commands run as on a machine of their own, at `address`."""

    def __init__(self, number: int):
        self.address = f"10.33.7.{number}"
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._inside = ["nsenter", f"--target={self._holder.pid}", "--net"]
        while os.readlink(f"/proc/{self._holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)  # until it has moved

    def run(self, *command: str, **how: Any) -> subprocess.Popen:
        """Start a command there; `how` as for Popen."""
        return subprocess.Popen([*self._inside, *command], **how)

    def cable(self, up: bool) -> None:
        """Plug it in, or pull it out."""
        self.configure(f"link set {_INTERFACE} {'up' if up else 'down'}")

    def configure(self, line: str) -> None:
        """Run one `ip` command there."""
        _command(shlex.join([*self._inside, "ip", *line.split()]))

    def crash(self) -> None:
        """Kill all that runs there, at once."""
        here, mine = os.readlink(f"/proc/{self._holder.pid}/ns/net"), self._holder.pid
        for pid in [
            int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != mine
        ]:
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours
                if os.readlink(f"/proc/{pid}/ns/net") == here:
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts and a cable between them; in the end nothing of them is left. See `why_no_slow_link`."""
    with contextlib.ExitStack() as stack:
        hosts = [Host(number) for number in (1, 2)]
        for host in hosts:
            stack.callback(host._holder.wait)
            stack.callback(host._holder.kill)
            stack.callback(host.crash)
        first, second = hosts
        end = f"{_INTERFACE} netns {second._holder.pid}"
        first.configure(f"link add {_INTERFACE} type veth peer name {end}")
        for host in hosts:
            host.configure(f"addr add {host.address}/24 dev {_INTERFACE}")
            host.configure("link set lo up")
            host.cable(up=True)
        yield first, second


class PacedLayer(nn.Module):
    """A float32 weight of `mib` MiB, and in place of computing a wait: `seconds`, in backward twice as long.

    Its result is its argument, and the gradient of its weight is zero.
    """

    def __init__(self, mib: float, seconds: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(int(mib * 2**18)))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        y = x + 0 * self.weight.sum()
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(2 * self.seconds))
        return y
