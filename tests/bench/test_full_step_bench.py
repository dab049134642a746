"""Full training steps: however they are put together, they compute what the plain model does."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from cs336_systems.bench.full_step_bench import LOSS_STEPS, benchmark_full_step
from cs336_systems.configs import model_size
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from labbook.rows import save_rows

TINY = replace(model_size("tiny", 2026), num_layers=1)
SHAPE = {"context_length": 8, "batch_size": 2}
RUN = SHAPE | {"dtype": "float32", "steps": 1, "warmup_steps": 0}


def plain_losses():
    """Loss and norm of the gradient in one process, on the whole batch."""
    torch.manual_seed(0)
    model = build_model(TINY, SHAPE["context_length"])
    tokens, targets = torch.randint(TINY.vocab_size, (2, SHAPE["batch_size"], SHAPE["context_length"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(LOSS_STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        yield loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        optimizer.step()


def measured(world_size, **options):
    tables = defaultdict(list)
    for table, rows in benchmark_full_step(world_size, TINY, **RUN, **options):
        tables[table] += rows
        save_rows(rows, "leaderboard", table)  # they fit the schema
    return tables


def test_losses_are_the_plain_models_and_memory_is_chosen():
    pytest.importorskip("triton")
    tables, wanted = measured(2, implementations=["selective"], profile=True), list(plain_losses())
    rows = tables["full_step_losses"]
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in wanted], rel=1e-5)
    assert [row["gradient_norm"] for row in rows] == pytest.approx([norm for _, norm in wanted], rel=1e-4)
    assert [row["status"] for row in tables["full_step_times"]] == ["ok"]
    kept = {row["tensor"]: row["count"] for row in tables["full_step_kept"]}
    assert kept.keys() == {"qkv", "h", "ab"}
    assert 0 < sum(kept.values()) < 3 * TINY.num_layers  # half of it fits
    assert {row["range"] for row in tables["full_step_kernels"]} >= {"forward", "backward", "optimizer"}
    assert {row["lane"] for row in tables["full_step_timeline"]} == {"compute", "communication"}


def test_what_cannot_run_here_is_skipped_with_its_reason():
    rows = measured(2, implementations=["fsdp2_compiled"])["full_step_times"]
    assert [(row["status"], "needs a GPU" in row["reason"]) for row in rows] == [("skipped", True)]


@pytest.mark.gpu(2)
def test_all_of_them_over_nccl():
    options = RUN | {"dtype": "bfloat16", "profile": True}
    tables = defaultdict(list)
    for table, rows in benchmark_full_step(2, TINY, **options):
        tables[table] += rows
    assert {row["status"] for row in tables["full_step_times"]} == {"ok"}
    first = [row["loss"] for row in tables["full_step_losses"] if row["step_index"] == 1]
    assert first == pytest.approx([first[0]] * len(first), rel=5e-3)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation 'magic' is unknown; allowed: fsdp2_compiled"):
        next(benchmark_full_step(2, TINY, **RUN, implementations=["magic"]))
