"""The shipped tiles fit three generations of GPU, told without having one."""

import os

import pandas as pd
import pytest

pytest.importorskip("triton")

from cs336_systems.attention.compile_resources import compile_tiles
from cs336_systems.attention.hopper_common import has_registers_for_backward

# Ada, Blackwell for data centers and for desktops.
OTHERS = [
    ("forward", "bfloat16", 64, 89),
    ("forward", "bfloat16", 64, 103),
    ("dkdv", "bfloat16", 128, 120),
]
SAMPLE = [
    ("hopper_backward", "bfloat16", 128, 90),
    ("dq", "tf32", 64, 80),
    ("dkdv", "float32", 64, 80),
]


def test_no_tile_of_the_sample_exceeds_its_chip():
    """Those of other GPUs do not spill; by TMA the last would, 2.5 kB a thread."""
    rows = pd.DataFrame(compile_tiles(SAMPLE + OTHERS))
    assert list(rows["kernel"]) == [kernel for kernel, *_ in SAMPLE + OTHERS]
    assert (rows["registers"] <= 255).all()
    # What an assembler makes so slow is not chosen.
    slow = set() if has_registers_for_backward() else {"hopper_backward"}
    assert set(rows[rows["serialized"]]["kernel"]) == slow, rows.to_string()
    assert (rows["shared_bytes"] <= rows["shared_limit_bytes"]).all()
    others = rows[len(SAMPLE) :]
    assert list(others["capability"]) == [capability for *_, capability in OTHERS]
    assert (others["spilled_bytes"] == 0).all(), rows.to_string()
    assert (others["shared_bytes"] <= 101_376).all(), rows.to_string()


def test_inductor_finds_the_assembler_set():
    """Else it sets torch's own, which other kernels then get as well."""
    assert os.environ["TRITON_PTXAS_PATH"]
