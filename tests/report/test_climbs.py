"""The ladder as a table: gains are against the last version kept."""

from dataclasses import dataclass

import pandas as pd
import pytest

from cs336_systems.report.climbs import climbed, outcome


@dataclass
class Technique:
    name: str
    gain: tuple[float, float] = (1.0, 1.1)
    kept: bool = True


def test_gains_are_against_the_last_version_kept():
    times = pd.Series({"first": 8.0, "a": 4.0, "tried": 5.0, "b": 2.0})
    table = climbed(times, "first", [Technique("a"), Technique("tried", kept=False), Technique("b")])
    assert table["technique"].tolist() == ["first", "a", "tried", "b"]
    assert table["rung"].tolist() == ["0", "1", "", "2"]
    assert table["gain"].tolist()[1:] == [2.0, 0.8, 2.0]
    assert table["kept"].tolist()[1:] == ["kept", "dropped", "kept"]


def test_what_is_not_measured_breaks_nothing():
    table = climbed(pd.Series({"first": 8.0, "b": 4.0}), "first", [Technique("a"), Technique("b")])
    assert table["outcome"].tolist()[1:] == ["not measured", "more"]
    assert climbed(pd.Series(dtype=float), "first", [Technique("a")])["time_ms"].isna().all()


def test_what_failed_says_why():
    times = pd.Series({"first": 8.0, "a": float("nan"), "b": 4.0})
    table = climbed(times, "first", [Technique("a"), Technique("b")], {"a": "error: off by 0.4"})
    assert table["outcome"].tolist()[1:] == ["error: off by 0.4", "more"]


@pytest.mark.parametrize(
    ("gain", "text"),
    [(0.9, "a loss"), (1.02, "less"), (1.045, "as predicted"), (1.1, "as predicted"), (1.2, "more")],
)
def test_outcomes(gain, text):
    assert outcome(gain, (1.05, 1.1)) == text
