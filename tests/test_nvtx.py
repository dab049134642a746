"""Ranges: named by nesting, free and invisible while nobody records."""

import pytest
import torch

from cs336_systems import nvtx as ranges
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.nvtx import annotate, recording


def recorded_names(run) -> list[str]:
    """Names of the record_function ranges that `run()` opened, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    events = [event for event in profiler.events() if event.is_user_annotation]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


@pytest.fixture
def nvtx(monkeypatch) -> list[str]:
    """NVTX calls, on a machine that pretends to have a GPU: '+name' for a push, '-' for a pop."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"+{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("-"))
    return calls


def test_nvtx_and_record_function_are_told_the_same(nvtx):
    def run():
        with recording(), annotate("forward"):
            with recording():  # nests
                pass
            with annotate("layer"):
                pass

    assert recorded_names(run) == ["forward", "layer"]
    assert nvtx == ["+forward", "+layer", "-", "-"]


def test_modules_open_ranges_only_while_recorded_and_compile_into_one_graph_even_then():
    model = build_model(model_size("tiny"), 8)
    tokens = torch.zeros(1, 8, dtype=torch.long)

    def run():
        with recording(model):
            model(tokens)

    attention = "attn q_proj k_proj v_proj rope rope attention scores softmax values output_proj"
    block = f"ln1 {attention} ln2 ffn w1 w3 w2"
    expected = f"token_embeddings layers.0 {block} layers.1 {block} ln_final lm_head"
    assert recorded_names(run) == expected.split()
    assert recorded_names(lambda: model(tokens)) == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with recording(model):
        torch.testing.assert_close(compiled(tokens), model(tokens))


def test_ranges_close_when_the_code_inside_raises(nvtx):
    model = build_model(model_size("tiny"), 8)
    with recording(model):
        with pytest.raises(IndexError):
            model(torch.full((1, 8), 10**6))
        assert sum(call == "-" for call in nvtx) == sum(call != "-" for call in nvtx) > 0
    with pytest.raises(KeyError), recording():
        raise KeyError
    assert ranges._recording is False
