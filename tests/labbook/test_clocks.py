"""Clock and power during a measurement, from nvidia-smi where there is one."""

from types import SimpleNamespace

import pytest
import torch

from labbook import clocks

SAID = "1980, 120.5, 0\n1700, 650.0, 100\n1600, 690.0, 100\n1650, [N/A], 100\n1500, 700.0, 100\n14"


@pytest.fixture
def tool(monkeypatch):
    """A nvidia-smi that has said SAID when it is stopped."""
    watch = SimpleNamespace(stopped=False, communicate=lambda: (SAID, None))
    watch.terminate = lambda: setattr(watch, "stopped", True)
    monkeypatch.setattr(clocks.shutil, "which", lambda name: name)
    monkeypatch.setattr(clocks.subprocess, "Popen", lambda *arguments, **options: watch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    return watch


def test_medians_of_the_busy_samples(tool):
    with clocks.watched_clocks(torch.device("cpu")) as watched:
        pass
    assert (watched, tool.stopped) == ({}, False), "without a GPU nothing is asked"
    with clocks.watched_clocks(torch.device("cuda")) as watched:
        assert not tool.stopped
    assert (watched, tool.stopped) == ({"sm_clock_mhz": 1600, "power_w": 690}, True)


def test_it_stops_watching_when_the_measurement_fails(tool):
    with pytest.raises(RuntimeError), clocks.watched_clocks(torch.device("cuda")):
        raise RuntimeError
    assert tool.stopped
