"""What wrappers do in a step, seen on two ranks."""

import pandas as pd
import pytest

from cs336_systems.bench import log_gathers, log_messages


def test_from_the_second_step_on_messages_leave_at_once():
    """Single gradients as they become ready, buckets with their last gradient."""
    log = pd.DataFrame(log_messages(2, [None, 0.25], backend="gloo"))
    log["sent"] = log.groupby(["bucket_size_mb", "step_index"], dropna=False)["gradients"].cumsum()
    first, second = (log[log["step_index"] == step] for step in (1, 2))
    assert (second["ready"] == second["sent"]).all()
    assert (first["ready"] >= first["sent"]).all()
    assert (first["ready"] > first["sent"]).any()
    single, buckets = second[second["bucket_size_mb"].isna()], second[second["bucket_size_mb"] == 0.25]
    assert len(single) == single["sent"].max() == buckets["sent"].max() == 21
    assert len(buckets) < 21
    assert buckets["mb"].max() <= 0.25
    assert (buckets["buffers"] == 1).all()


def test_both_units_of_fsdp_move_the_same_bytes_and_hold_what_they_may():
    options = {"weight": {}, "block": {"unit_types": ("TransformerBlock",)}}
    log = pd.DataFrame(log_gathers(2, options, num_layers=4))
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
