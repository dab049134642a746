"""Which all-gathers are whose, and when what they bring was needed: a step drawn by hand."""

import pytest

from labbook.profiles import gather_times
from labbook.profiles.gathers import units_of

MS = 10**6
NCCL = "ncclDevKernel_AllGather_RING_LL"
KERNELS = [
    (NCCL, 1, 1, 2, 20),
    (NCCL, 102, 103, 109, 20),
    (NCCL, 104, 109, 115, 20),
    ("gemm", 111, 112, 130, 7),
    ("gemm", 121, 131, 140, 7),
    ("Memcpy", 122, 198, 199, 8),
    (NCCL, 152, 153, 158, 20),
    ("gemm", 161, 162, 170, 7),
    ("ncclSum", 151, 152, 153, 20),
]


def test_units_have_one_gather_each_and_blocks_equally_many():
    units = ["token_embeddings", "layers.0", "layers.1"]
    assert units_of(3, units) == units
    assert units_of(5, units) == ["token_embeddings"] + ["layers.0"] * 2 + ["layers.1"] * 2
    for messages in (2, 4):
        with pytest.raises(ValueError, match=f"{messages} all-gathers are not those of token_emb"):
            units_of(messages, units)


def test_each_pass_has_its_gathers_and_its_marks(a_profile):
    """The first step and a copy on a stream of its own are left out; backward gathers one block again."""
    ranges = [
        ("measure", 0, 50),
        ("measure", 100, 200),
        ("backward", 150, 190),
    ]
    for layer, at in [("0", 10), ("0", 110), ("1", 120), ("1", 160)]:
        ranges.append((f"needs layers.{layer}", at, at + 1))
    in_ms = [(name, MS * start, MS * end) for name, start, end in ranges]
    launched = [(name, MS * a, MS * b, MS * c, stream) for name, a, b, c, stream in KERNELS]
    units = {"forward": ["layers.0", "layers.1"], "backward": ["layers.1"]}
    arguments = []

    def could_begin(launches, ends, mark):
        arguments.append((list(launches // MS), list(ends // MS), mark // MS))
        return mark + MS

    rows = gather_times(a_profile(in_ms, launched), units, could_begin)
    assert rows.to_numpy().tolist() == [
        ["forward", "layers.0", 1, 3.0, 9.0, 11.0],
        ["forward", "layers.1", 1, 9.0, 15.0, 21.0],
        ["backward", "layers.1", 1, 53.0, 58.0, 61.0],
    ]
    assert [mark for *_, mark in arguments] == [110, 120, 160]
    assert arguments[0][:2] == ([111, 121, 161], [130, 140, 170])
