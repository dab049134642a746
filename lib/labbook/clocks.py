"""What the GPU's clock and power were while something ran: a kernel that draws too much slows itself down."""

import io
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
import torch

EVERY_MS = 100


@contextmanager
def watched_clocks(device: torch.device) -> Iterator[dict[str, float]]:
    """Ask nvidia-smi every tenth of a second, and on leaving fill in the medians: sm_clock_mhz, power_w.

    Samples of an idle GPU do not count. Without an NVIDIA GPU, or without nvidia-smi, nothing is filled in.
    """
    medians: dict[str, float] = {}
    command = shutil.which("nvidia-smi")
    if device.type != "cuda" or not command:
        yield medians
        return
    query = ["--query-gpu=clocks.sm,power.draw,utilization.gpu", "--format=csv,noheader,nounits"]
    which = ["-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}", "-lms", str(EVERY_MS)]
    watch = subprocess.Popen(
        [command, *query, *which], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield medians
    finally:
        watch.terminate()
        samples = pd.read_csv(io.StringIO(watch.communicate()[0]), names=["sm_clock_mhz", "power_w", "busy"])
        samples = samples.apply(pd.to_numeric, errors="coerce").dropna()  # [N/A]; the last line may be cut
        medians |= samples[samples.busy > 90].drop(columns="busy").median().dropna().to_dict()
