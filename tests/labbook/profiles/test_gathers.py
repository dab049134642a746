"""Which all-gathers are whose, and when what they bring was needed: a step drawn by hand."""

from types import SimpleNamespace

import pandas as pd
import pytest

from labbook.profiles import gather_times
from labbook.profiles.gathers import units_of

MS = 10**6
NCCL = "ncclDevKernel_AllGather_RING_LL"


def kernel(launch, start, end, name="gemm", stream=7):
    is_message = name.startswith("nccl")
    times = {"launch_ns": launch * MS, "start_ns": start * MS, "end_ns": end * MS}
    named = {"name": name, "class": "communication" if is_message else "matmul"}
    return times | named | {"stream": 20 if is_message else stream}


def test_units_have_one_gather_each_and_blocks_equally_many():
    units = ["token_embeddings", "layers.0", "layers.1"]
    assert units_of(3, units) == units
    assert units_of(5, units) == ["token_embeddings"] + ["layers.0"] * 2 + ["layers.1"] * 2
    for messages in (2, 4):
        with pytest.raises(ValueError, match=f"{messages} all-gathers are not those of token_emb"):
            units_of(messages, units)


def test_each_pass_has_its_gathers_and_its_marks():
    """The first step and a copy on a stream of its own are left out; backward gathers one block again."""
    ranges = [("measure", 0, 50), ("measure", 100, 200), ("backward", 150, 190)]
    ranges += [
        ("needs layers.0", 10, 10),
        ("needs layers.0", 110, 110),
        ("needs layers.1", 120, 120),
    ]
    ranges += [("needs layers.1", 160, 160)]
    kernels = [kernel(1, 1, 2, NCCL), kernel(102, 103, 109, NCCL), kernel(104, 109, 115, NCCL)]
    kernels += [
        kernel(111, 112, 130),
        kernel(121, 131, 140),
        kernel(122, 90, 199, "copy", stream=8),
    ]
    kernels += [
        kernel(152, 153, 158, NCCL),
        kernel(161, 162, 170),
        kernel(151, 152, 153, "ncclSum"),
    ]
    kernels[5]["start_ns"] = 198 * MS
    profile = SimpleNamespace(
        ranges=pd.DataFrame(
            [(name, a * MS, b * MS) for name, a, b in ranges],
            columns=["name", "start_ns", "end_ns"],
        ),
        kernels=pd.DataFrame(kernels),
    )
    units = {"forward": ["layers.0", "layers.1"], "backward": ["layers.1"]}
    arguments = []

    def could_begin(launches, ends, mark):
        arguments.append((list(launches // MS), list(ends // MS), mark // MS))
        return mark + MS

    rows = gather_times(profile, units, could_begin)
    assert rows.to_numpy().tolist() == [
        ["forward", "layers.0", 1, 3.0, 9.0, 11.0],
        ["forward", "layers.1", 1, 9.0, 15.0, 21.0],
        ["backward", "layers.1", 1, 53.0, 58.0, 61.0],
    ]
    assert [mark for *_, mark in arguments] == [110, 120, 160]
    assert arguments[0][:2] == ([111, 121, 161], [130, 140, 170])
