"""What wrappers do in a step, seen on two ranks."""

import pandas as pd

from cs336_systems.bench import log_messages


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
