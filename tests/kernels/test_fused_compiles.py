"""The fused kernels compile for a GPU, at the 8B model's sizes, within its registers and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("triton")
from cs336_systems.attention.compile_resources import SHARED_LIMIT


def test_no_kernel_spills_on_hopper():
    """The interpreter would run what no compiler takes."""
    command = [sys.executable, str(Path(__file__).with_name("compile_fused.py")), "90"]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = pd.DataFrame(json.loads(run.stdout.splitlines()[-1]))
    assert len(rows) == 12
    assert (rows["spilled_bytes"] == 0).all(), rows.to_string()
    assert (rows["shared_bytes"] <= min(SHARED_LIMIT.values())).all(), rows.to_string()
