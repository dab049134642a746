"""Rows of earlier kernels are announced, others are not."""

import pandas as pd

from cs336_systems.attention.revision import SINCE
from cs336_systems.report.age import note_earlier_kernels


def rows(*measured_at, implementation="flash_triton"):
    return pd.DataFrame({"implementation": implementation, "dtype": "float32", "measured_at": measured_at})


def test_rows_of_earlier_kernels_are_counted(monkeypatch):
    shown = []
    monkeypatch.setattr("cs336_systems.report.age.answer", lambda *words: shown.append(words))
    peers = rows("2020-01-01T00:00:00Z", implementation="flex")
    note_earlier_kernels(rows("2020-01-01T00:00:00Z", SINCE["float32"]), peers, rows("2020-06-01T00:00:00Z"))
    assert "Of 3 rows of ours 2 were measured with earlier kernels" in shown[0][1]
    note_earlier_kernels(rows(SINCE["float32"]), peers)
    assert len(shown) == 1
