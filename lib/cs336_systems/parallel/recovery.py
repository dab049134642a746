"""A training of two hosts under torchrun that goes on from its newest checkpoint when a host has died."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cs336_systems.configs import model_size
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.hosts import Host
from cs336_systems.parallel.launch import WorkerContext


def train(context: WorkerContext, folder: str, steps: int, every: int) -> None:
    """The worker: train the tiny model for so many steps in all, with a checkpoint after every few."""
    from cs336_systems.parallel import checkpoint  # not above: it takes seconds to import

    def note(event: str, step: int) -> None:
        row = {"event": event, "step": step, "rank": context.rank, "at_s": time.time()}
        with Path(folder, "notes").open("a") as file:
            file.write(json.dumps(row) + "\n")

    note("started", 0)
    model = FSDP(build_model(model_size("tiny"), 64), unit_types=("TransformerBlock",))
    optimizer = torch.optim.AdamW(model.parameters())
    step, tokens = checkpoint.load(folder, model, optimizer), torch.zeros(1, 65, dtype=torch.long)
    try:
        while step < steps:
            optimizer.zero_grad()
            cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            step += 1
            note("step", step)
            if step % every == 0:
                checkpoint.save(folder, step, model, optimizer)
                note("saved", step)
    except RuntimeError:  # of a collective whose other side is gone
        note("noticed", step)
        raise


class Torchrun:
    """One torchrun on each of some hosts, which find each other by rendezvous at the first.

    Args:
        keep_alive_s: seconds between the heartbeats of a host; when three are missing it counts as dead.
        timeout_s: of a collective.
        arguments: those of `train`.
    """

    def __init__(
        self, hosts: Sequence[Host], keep_alive_s: float, timeout_s: float, **arguments: int
    ):
        self.hosts, self.folder = hosts, tempfile.mkdtemp()
        self._log = Path(self.folder, "log")
        of_worker = json.dumps({"folder": self.folder} | arguments)
        self._rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29400"]
        self._rendezvous += [f"--nnodes={len(hosts)}", "--rdzv-id=1", "--max-restarts=9"]
        self._keep_alive = f"keep_alive_interval={keep_alive_s:g},keep_alive_max_attempt=3"
        self._worker = ["-m", "cs336_systems.parallel", f"{__name__}:train", "--backend=gloo"]
        self._worker += [f"--timeout-s={timeout_s:g}", "--arguments", of_worker]

    def start(self, number: int) -> None:
        """Boot one of the hosts."""
        host, environment = (
            self.hosts[number],
            {"GLOO_SOCKET_IFNAME": "host", "OMP_NUM_THREADS": "1"},
        )
        # A survivor that shares its store hands out no address for a newcomer (PyTorch 2.13).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        own = [
            f"--rdzv-conf=is_host={int(number == 0)},{self._keep_alive}",
            f"--local-addr={host.address}",
        ]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *self._rendezvous,
            *own,
            *self._worker,
        ]
        with self._log.open("a") as log:
            host.run(*command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT)

    def notes(self) -> list[dict[str, Any]]:
        """What the workers noted, in its order: event, step, rank, at_s (of time.time())."""
        path = Path(self.folder, "notes")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(
        self, event: str, step: int = 0, after_s: float = 0.0, timeout_s: float = 300.0
    ) -> None:
        """Until a worker has noted it, at this step or a later one, and after this time."""
        deadline = time.monotonic() + timeout_s
        while not any(
            note["event"] == event and note["step"] >= step and note["at_s"] > after_s
            for note in self.notes()
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no {event} {step} in {timeout_s:g} s:\n{self._log.read_text()[-3000:]}"
                )
            time.sleep(0.02)
