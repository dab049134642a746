"""Kernel classes and short names, on names that real profiles contain."""

import csv
import sqlite3
from pathlib import Path

import pytest

from labbook.profiles.names import kernel_class, short_name
from labbook.profiles.torch_trace import read_trace
from labbook.project import project
from labbook.rows import published

DATA = Path(__file__).parent / "data"
with open(DATA / "names.csv", newline="") as file:
    NAMES = list(csv.DictReader(file))


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row["short"])
def test_class_and_short_name(row):
    name = row["name"]
    assert (kernel_class(name), short_name(name)) == (row["class"], row["short"])


def test_no_kernel_of_real_profiles_is_unclassified():
    tables = ("nsys_top_kernels", "nsys_top_kernels_xl_a100")
    names = {name for table in tables for name in published(table).kernel}
    query = "SELECT value FROM StringIds JOIN CUPTI_ACTIVITY_KIND_KERNEL ON id = demangledName"
    with sqlite3.connect(DATA / "sample.sqlite") as export:
        names |= {name for (name,) in export.execute(query)}
    for kept in (project().figures / "h200" / "nsys_profile").glob("*.json.gz"):
        names |= set(read_trace(kept).kernels.name)
    assert len(names) > 100
    assert [name for name in names if kernel_class(name) == "other"] == []
    assert max(map(len, map(short_name, names))) < 80
