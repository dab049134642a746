import pandas as pd
import pytest

from labbook import machine


def measured(implementation: str, context_length: int, p50_ms: float | None, **more) -> dict:
    """One row; no time means that memory ran out."""
    spread = {} if p50_ms is None else {"p20_ms": 0.9 * p50_ms, "p80_ms": 1.2 * p50_ms}
    status = "oom" if p50_ms is None else "ok"
    row = {"implementation": implementation, "pass": "forward", "batch_size": 8, "d_head": 64}
    return (
        row | {"context_length": context_length, "p50_ms": p50_ms, "status": status} | spread | more
    )


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """A folder of figures that is this test's."""
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured_cards(monkeypatch) -> list:
    """Machine cards are measured at once; the list has an item for each time."""
    calls = []
    monkeypatch.setattr(
        machine, "_matmul_tflops", lambda device: calls.append(device) or {"float32": 0.1}
    )
    monkeypatch.setattr(machine, "_copy_gbps", lambda device: 10.0)
    return calls


@pytest.fixture
def shown(monkeypatch) -> list:
    """What is displayed."""
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda what, **_: shown.append(what))
    return shown


@pytest.fixture
def rows() -> pd.DataFrame:
    """Two implementations over three contexts; plain runs out of memory at the last."""
    times = {("plain", 256): 1.0, ("plain", 512): 4.0, ("plain", 1024): None}
    times |= {("compiled", 256): 0.5, ("compiled", 512): 1.0, ("compiled", 1024): 8.0}
    return pd.DataFrame([measured(name, context, time) for (name, context), time in times.items()])
