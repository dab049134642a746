"""What a sharding strategy holds and sends, against the formulas of the paper and against real training."""

import pandas as pd
import pytest

from cs336_systems import parallel
from cs336_systems.accounting import sharding_costs
from cs336_systems.accounting.flops import parameter_count
from cs336_systems.accounting.sharding_costs import STRATEGIES
from cs336_systems.configs import ModelConfig, model_size
from cs336_systems.other_notebooks import taken_from
from labbook import grid

XL = model_size("xl", 2025)
FSDP = [name for name, strategy in STRATEGIES.items() if "parameters" in strategy.shards]


@pytest.fixture(scope="module")
def measured():
    """Memory and messages of every strategy on two ranks, by the functions that notebook 42 measures with."""
    notebook = "42_optimizer_state_sharding_accounting"
    look, memory_rows, message_rows = (
        taken_from(notebook, name) for name in ("look", "memory_rows", "message_rows")
    )
    shape = {"batch_size": 4, "context_length": 128, "attention": "sdpa", "compiled": False}
    shape |= {"world_size": 2, "backend": "gloo", **model_size("tiny").columns()}
    cases = grid(dtype=["float32", "bfloat16"], implementation=[*STRATEGIES], **shape)
    memory, messages = [], []
    for case, held, _, sent in parallel.stream(look, 2, cases, backend="gloo"):
        memory += memory_rows(case, held)
        messages += message_rows(case, sent)
    return {"sharding_memory": pd.DataFrame(memory), "sharding_messages": pd.DataFrame(messages)}


def test_the_states_that_a_step_ends_with_add_up_as_in_the_paper():
    """Rajbhandari et al., section 3: parameters, gradients and two moments, here all of them float32."""
    whole = 4 * parameter_count(XL)
    for ranks in (2, 8):
        held = {name: sharding_costs.held_bytes(XL, name, ranks, 4, 512) for name in STRATEGIES}
        ended = {name: pd.Series(of["after step"]).drop("rest").sum() for name, of in held.items()}
        assert ended["ddp"] == pytest.approx(4 * whole, rel=1e-3)
        assert ended["zero"] == ended["sharded"] == pytest.approx(2 * whole + 2 * whole / ranks, rel=1e-3)
        for name in FSDP:
            assert ended[name] == pytest.approx(4 * whole / ranks, rel=1e-3)


def test_the_step_sends_what_the_paper_says():
    """Section 7: stage 3 sends 1.5 times what data parallelism does. So does stage 1 after an all-reduce."""
    whole = 4 * parameter_count(XL)
    for ranks in (2, 8):
        around = (ranks - 1) / ranks
        sent = {name: sharding_costs.sent_bytes(XL, name, ranks) for name in STRATEGIES}
        assert sent["ddp"] == {"all_reduce": 2 * around * whole}
        assert sent["zero"] == {"all_reduce": 2 * around * whole, "broadcast": around * whole}
        for name in FSDP:
            passes = 2 if name == "fsdp2_kept" else 3
            assert sum(sent[name].values()) == pytest.approx(passes * around * whole, rel=0.02)
            half = sharding_costs.sent_bytes(XL, name, ranks, "bfloat16")
            assert sum(half.values()) == pytest.approx(passes / 2 * around * whole, rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_what_two_ranks_hold(measured, strategy, dtype):
    rows = measured["sharding_memory"].query("implementation == @strategy and dtype == @dtype")
    assert list(rows["moment"].unique()) == list(sharding_costs.MOMENTS)
    owned = rows[(rows["category"] != "rest") & (rows["moment"] != "peak")]
    assert owned["predicted_mib"].to_numpy() == pytest.approx(owned["size_mib"].to_numpy(), rel=2e-3)
    peak = rows.query("moment == 'peak'")
    predicted, seen = peak["predicted_mib"].sum(), peak["size_mib"].sum()
    # A cast shard whose last holder is one of Gloo's threads is freed there, where no profiler looks.
    unseen = sum(sharding_costs.gathered_units(model_size("tiny"), strategy, dtype)["forward"].values()) / 2
    assert predicted * (1 - 2e-3) <= seen <= predicted * (1 + 2e-3) + (dtype != "float32") * unseen / 2**20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_messages_are_what_two_ranks_send(measured, strategy, dtype):
    rows = measured["sharding_messages"].query("implementation == @strategy and dtype == @dtype")
    assert set(rows["collective"]) >= set(STRATEGIES[strategy].sends)
    assert rows["predicted_sent_mb"].to_numpy() == pytest.approx(
        rows["sent_mb"].to_numpy(), rel=5e-3, abs=1e-4
    )


def test_the_peak_of_a_small_batch_is_where_gradients_are_complete():
    """Few tokens and many layers: then activations hardly count, and backward ends at the peak."""
    deep = ModelConfig("deep", 2025, 64, 192, 24, 4, vocab_size=64)
    held = sharding_costs.held_bytes(deep, "fsdp_block", 2, 1, 8)
    assert held["peak"]["gradients"] > 0.9 * held["after step"]["gradients"]
    assert sharding_costs.held_bytes(XL, "fsdp_block", 2, 4, 512)["peak"]["gradients"] < 2**27


def test_the_peaks_are_those_of_two_h200s():
    """GiB that PyTorch's allocator reported, its rounding included: xl with four sequences of 512 a rank."""
    seen = {
        ("float32", "ddp", 2025): 47.99,
        ("float32", "fsdp2", 2025): 29.54,
        ("float32", "fsdp_block", 2026): 39.06,
        ("bfloat16", "ddp", 2026): 69.49,
        ("bfloat16", "fsdp2", 2026): 30.83,
        ("bfloat16", "fsdp_weight", 2025): 22.21,
    }
    for (dtype, strategy, edition), peak_gib in seen.items():
        held = sharding_costs.held_bytes(model_size("xl", edition), strategy, 2, 4, 512, dtype)
        assert sum(held["peak"].values()) / 2**30 == pytest.approx(peak_gib, rel=0.02)
