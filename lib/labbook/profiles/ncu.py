"""Nsight Compute: what the hardware counts while a kernel runs."""

import io
import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pandas as pd

_NCU = ("ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off")


def count_kernels(program: str, given: Any, metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Run a program under `ncu`, and count what it launches from cudaProfilerStart to cudaProfilerStop.

    The clock is left as it is: ncu's own is lower.

    Args:
        program: its text, which finds `given`, as JSON, in sys.argv[1].
        metrics: of Nsight Compute, `ncu --query-metrics`.

    Returns:
        For each kernel, in order: kernel, its name without arguments, and the metrics in base units.

    Raises:
        RuntimeError: there is no ncu, it or the program failed, or no kernel ran; with what was said last.
    """
    command = [*_NCU, "--metrics", ",".join(metrics), sys.executable, "-c", program, json.dumps(given)]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("there is no ncu on PATH; install Nsight Compute") from None
    _, mark, table = run.stdout.partition('"ID"')
    if run.returncode or not mark:
        raise RuntimeError(f"ncu counted nothing: {(run.stdout + run.stderr)[-2000:]}")
    rows = pd.read_csv(io.StringIO(mark + table), thousands=",").astype({"Metric Value": float})
    rows["kernel"] = rows["Kernel Name"].str.extract(r"([^\s<(]+)(?:[<(]|$)")[0]
    each = rows.pivot(index=["ID", "kernel"], columns="Metric Name", values="Metric Value")
    return each.reset_index("kernel").to_dict("records")
