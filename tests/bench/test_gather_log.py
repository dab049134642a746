"""What FSDP gathers and holds, counted on two ranks."""

import pandas as pd
import pytest

from cs336_systems.bench import log_gathers


def test_both_units_move_the_same_bytes_and_hold_what_they_may():
    options = {"weight": {}, "block": {"unit_types": ("TransformerBlock",)}}
    log = pd.DataFrame(log_gathers(2, options, num_layers=4, timeout_s=120))
    total = log["total_mb"].max()
    moved = log.groupby(["implementation", "event"])["mb"].sum()
    head = log.query("unit == 'lm_head'")["mb"].max()
    for name in options:
        assert moved[name, "reduce"] == pytest.approx(total)
        assert moved[name, "gather"] == pytest.approx(2 * total - head)
        assert log.query("implementation == @name")["held_mb"].iloc[-1] == 0
    counts = log.query("event == 'gather'").groupby("implementation")["messages"].agg(["size", "sum"])
    assert counts.T.to_dict() == {"weight": {"size": 59, "sum": 59}, "block": {"size": 11, "sum": 59}}
    blocks = log.query("implementation == 'block'")
    block = blocks["mb"].max()
    assert blocks.groupby("pass")["held_mb"].max().to_dict() == pytest.approx(
        {"forward": 3 * block, "backward": 2 * block}
    )
