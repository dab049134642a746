"""Nsight Compute: what the hardware counts while a kernel runs."""

import io
import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pandas as pd


def count_kernels(program: str, given: Any, metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Run a program under `ncu`, and count what it launches from cudaProfilerStart to cudaProfilerStop.

    The clock is left as it is: ncu's own is lower.

    Args:
        program: its text, which finds `given`, as JSON, in sys.argv[1].
        metrics: of Nsight Compute, `ncu --query-metrics`.

    Returns:
        For each kernel, in order: kernel, its name without arguments, and the metrics in base units.

    Raises:
        RuntimeError: there is no ncu, or it or the program failed; the message ends with what it said.
    """
    command = [
        "ncu",
        "--csv",
        "--print-units",
        "base",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
    ]
    command += ["--metrics", ",".join(metrics), sys.executable, "-c", program, json.dumps(given)]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise RuntimeError("there is no ncu on PATH; install Nsight Compute") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"ncu failed: {(error.stdout + error.stderr)[-2000:]}") from None
    table = pd.read_csv(io.StringIO(said[said.index('"ID"') :]), thousands=",")
    each = table.pivot(index=["ID", "Kernel Name"], columns="Metric Name", values="Metric Value").astype(
        float
    )
    names = (
        each.index.get_level_values("Kernel Name").str.replace(r"[(<].*", "", regex=True).str.split().str[-1]
    )
    return each.assign(kernel=names).to_dict("records")
