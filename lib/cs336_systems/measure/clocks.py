"""What the GPU's clock and power were while something ran: a kernel that draws too much slows itself down."""

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

EVERY_MS = 100


@dataclass
class Clocks:
    """Medians over the samples; None where there are none."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None

    def as_row(self) -> dict[str, float | None]:
        """The value columns of a row."""
        return {"sm_clock_mhz": self.sm_clock_mhz, "power_w": self.power_w}


@contextmanager
def watched_clocks(device: torch.device) -> Iterator[Clocks]:
    """Ask nvidia-smi every tenth of a second; the result is filled in on leaving. Idle samples do not count.

    Without an NVIDIA GPU, or without nvidia-smi, nothing is asked.
    """
    clocks, command = Clocks(), shutil.which("nvidia-smi")
    if device.type != "cuda" or not command:
        yield clocks
        return
    query = ["--query-gpu=clocks.sm,power.draw,utilization.gpu", "--format=csv,noheader,nounits"]
    which = ["-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}"]
    watch = subprocess.Popen(
        [command, *query, *which, "-lms", str(EVERY_MS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield clocks
    finally:
        watch.terminate()
        samples = list(_samples(watch.communicate()[0]))
        if samples:
            clocks.sm_clock_mhz, clocks.power_w = (
                statistics.median(column) for column in zip(*samples, strict=True)
            )


def _samples(text: str) -> Iterator[tuple[float, float]]:
    """Clock and power of every line that says the GPU was busy."""
    for line in text.splitlines():
        try:
            clock, power, busy = map(float, line.split(","))
        except ValueError:  # the last line may be cut off; a value may be [N/A]
            continue
        if busy > 90:
            yield clock, power
